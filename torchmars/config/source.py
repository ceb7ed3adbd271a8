"""The value of `data.source`: a kind of source, and its parts after colons."""

import re
from dataclasses import dataclass

from torchmars.core.check import meant
from torchmars.core.errors import UserError

COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".xz", ".bz2")
STORE = re.compile(r"[a-z][a-z0-9+.-]*:(?=/)", re.IGNORECASE)  # begins the name of one's object


@dataclass(frozen=True)
class SourceKind:
    """A kind of sources. Readers are in data/corpus.py and data/foreign.py."""

    parts: tuple[str, ...] = ()
    """The text that may follow its name. A glob may hold colons where it is the last one."""
    suffixes: tuple[str, ...] = ()
    """Of the files that a folder of text gives. A kind without any reads no files of the user's."""
    plain: bool = True
    """Whether a file can be compressed, and be read from any of its lines or documents on."""
    tokens: bool = False
    """Whether another program has made tokens of the text."""


JSON = tuple(f".json{end}" for end in COMPRESSED)  # a plain .json is mostly no file of lines
OF_PROGRAMS = SourceKind(("glob",), tokens=True)
KINDS = {
    "stdlib": SourceKind(),
    "text": SourceKind(("glob",), (".txt", ".md")),
    "jsonl": SourceKind(("glob", "field"), (".jsonl", ".ndjson", ".jl", *JSON)),
    "parquet": SourceKind(("glob", "field"), (".parquet", ".parq", ".pq"), plain=False),
    "hf": SourceKind(("dataset", "config", "split", "field")),
    "nanogpt": OF_PROGRAMS,
    "llmc": OF_PROGRAMS,
    "megatron": OF_PROGRAMS,
}
# Names of data sets, each with the source that it stands for. What follows the name is appended.
NAMES = {"openwebtext": "hf:Skylion007/openwebtext", "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu"}


@dataclass(frozen=True)
class DataSource:
    """The parts of a `data.source`; those that were not given are empty, or have their default."""

    kind: str
    glob: str = ""
    dataset: str = ""
    config: str = ""
    split: str = "train"
    field: str = "text"

    @property
    def of_files(self) -> bool:
        """Whether its files are named by a glob, by data.files, or by both."""
        return bool(KINDS[self.kind].suffixes)

    @property
    def of_tokens(self) -> bool:
        """Whether another program has made tokens of its text."""
        return KINDS[self.kind].tokens


def parse_source(text: str) -> DataSource:
    """Return the source of a `data.source`. Raises `UserError` for a text of another form."""
    name, _, rest = text.partition(":")
    if name in NAMES:
        return parse_source(f"{NAMES[name]}:{rest}" if rest else NAMES[name])
    if name not in KINDS:
        known = [*KINDS, *NAMES]
        raise UserError(
            f"data.source = {text!r} is of no known kind: it must begin with one of "
            f"{', '.join(known)}, or a plugin's (--plugins){meant(name, known, before='; ')}"
        )
    parts = KINDS[name].parts
    store = STORE.match(rest)
    of_store = store.group() if store else ""
    rest = rest.removeprefix(of_store)
    values = rest.split(":", len(parts) - 1) if len(parts) > 1 else [rest] if rest else []
    if len(values) > len(parts) or any(":" in value for value in values) and len(parts) != 1:
        form = ":".join([name, *(part.upper() for part in parts)])
        raise UserError(f"data.source = {text!r} has too many parts: it must look like {form}")
    values[:1] = [of_store + value for value in values[:1]]
    given = {part: value for part, value in zip(parts, values) if value}
    if "dataset" in parts and "dataset" not in given:
        raise UserError(f"data.source = {text!r} names no data set: it must look like hf:DATASET")
    return DataSource(name, **given)
