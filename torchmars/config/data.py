"""Where the tokens come from."""

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torchmars.config.fields import Amount, Mark, Positive, require
from torchmars.config.source import parse_source
from torchmars.core.check import Interval, Name, Place
from torchmars.core.errors import UserError
from torchmars.core.places import place

Packing = Literal["stream", "best_fit"]


@dataclass(frozen=True)
class PartConfig:
    """[[data.mixture]], in TOML only: one corpus of a mixture."""

    source: str
    """As data.source."""
    weight: Amount
    """Its share of the samples, relative to the other parts."""
    name: Annotated[str, Name()] | None = None
    """Its name in metrics. Default: the source."""
    files: list[Annotated[str, Place(stores=True, pattern=True)]] = field(default_factory=list)
    """As data.files."""
    validation_files: list[Annotated[str, Place(stores=True, pattern=True)]] = field(
        default_factory=list
    )
    """As data.validation_files."""
    path: Annotated[str, Place()] | None = None
    """Folder of its shards. Default: in data.path, NAME-TOKENIZER, and a hash as in data.path."""

    @property
    def label(self) -> str:
        """The name of the part."""
        return self.name or self.source


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """Text to train on. stdlib: the Python standard library's sources. text:GLOB,
    jsonl:GLOB[:FIELD], parquet:GLOB[:FIELD]: files. hf:DATASET[:CONFIG[:SPLIT[:FIELD]]]: a data
    set of Hugging Face. openwebtext, fineweb-edu[:CONFIG]: names of two of these. nanogpt:FOLDER,
    llmc:FOLDER, megatron:PREFIX: tokens that another program has made."""
    files: list[Annotated[str, Place(stores=True, pattern=True)]] = field(default_factory=list)
    """For text, jsonl and parquet: files, folders and globs beside the source's own glob. A line
    `<|endoftext|>` of a text file ends a document."""
    validation_files: list[Annotated[str, Place(stores=True, pattern=True)]] = field(
        default_factory=list
    )
    """For nanogpt, llmc, megatron: files of validation tokens beside those whose names say val."""
    tokenizer: Annotated[str, Place(), Mark.IDENTITY] = "bytes"
    """bytes (256 values and an end-of-text token), gpt2 or another encoding of tiktoken, or the
    path of a Hugging Face tokenizer.json."""
    begin_token: Annotated[str, Mark.IDENTITY] = "none"
    """The token that each document begins with. none: no more than the one that ends the document
    before. auto: what the tokenizer's own template adds. Or a token of the vocabulary: <s>."""
    path: Annotated[str, Place()] | None = None
    """Folder of the tokenised shards. The first run fills it. Default: data/SOURCE-TOKENIZER; for
    text, jsonl and parquet -HASH follows, of source and files as written. With a mixture: the
    folder of its parts' folders, by default data."""
    mixture: list[PartConfig] = field(default_factory=list)
    """[[data.mixture]] tables: several corpora, with weights. In TOML only."""
    validation_fraction: Annotated[float, Interval(gt=0, le=0.5)] = 0.01
    """Share of the documents kept for validation: those whose hash falls below it."""
    processes: Positive | None = None
    """Processes that tokenise. The shards do not depend on it. Default: the cores that this
    process may use."""
    separate_documents: Annotated[bool, Mark.IDENTITY] = False
    """Compute each document of a window as if it were alone: attention inside it only, positions
    from 0. An end-of-text token begins a document."""
    packing: Annotated[Packing, Mark.IDENTITY] = "stream"
    """stream: windows are cut from the documents end to end. best_fit: few documents are cut, since
    windows are filled with documents that fit."""
    verify: Literal["full", "size", "off"] = "full"
    """How the shards are checked when a run starts. full: size and SHA-256 of every one. size:
    sizes only. off: nothing."""

    def resolve(self) -> "ResolvedData":
        """Return the section with its folder. Raises `UserError`."""
        if self.mixture:
            self._check_mixture()
            for part in self.mixture:
                check_source(part, f"data.mixture, {part.label!r}: ")
            return ResolvedData(**vars(self) | {"path": self.path or "data"})
        check_source(self)
        path = self.path or f"data/{folder_name(self.source, self)}"
        return ResolvedData(**vars(self) | {"path": path})

    def _check_mixture(self) -> None:
        """Raise `UserError` if the mixture contradicts itself or the rest of the section."""
        require(
            self.source == DataConfig.source and not self.files and not self.validation_files,
            "data.source, data.files and data.validation_files have no meaning beside "
            "[[data.mixture]]: name them in its tables",
        )
        labels = [part.label for part in self.mixture]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        require(
            twice is None,
            f"two tables of data.mixture are called {twice!r}: give each a name of its own",
        )
        require(
            any(part.weight for part in self.mixture),
            "data.mixture: every weight is 0: raise one",
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedData(DataConfig):
    """Where the tokens come from, and where the shards are."""

    path: str

    def corpora(self) -> "list[ResolvedData]":
        """Return the section of each part of the mixture; this one if there is none."""
        if not self.mixture:
            return [self]
        corpora = []
        for part in self.mixture:
            own = {name: getattr(part, name) for name in ("source", "files", "validation_files")}
            corpus = replace(self, mixture=[], **own)
            path = part.path or f"{self.path}/{folder_name(part.label, corpus)}"
            corpora.append(replace(corpus, path=path))
        return corpora


def check_source(corpus: PartConfig | DataConfig, where: str = "") -> None:
    """Raise `UserError`, which begins with `where`, if a corpus cannot be read from there."""
    text, files = corpus.source, corpus.files
    try:
        source = parse_source(text)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    require(
        not source.of_tokens or bool(source.glob),
        f'{where}data.source = "{text}" names no files: write {source.kind}:PATH',
    )
    if named := source.glob or source.dataset:
        place(named, f"{where}data.source", stores=source.of_files, pattern=True)
    require(
        not source.of_files or bool(files or source.glob) or corpus.path is not None,
        f"{where}data.files is empty: name the files, folders or globs that data.source = "
        f'"{text}" reads',
    )
    for name, used in (("files", source.of_files), ("validation_files", source.of_tokens)):
        require(
            used or not getattr(corpus, name),
            f'{where}data.{name} has no meaning for data.source = "{text}": leave it out',
        )


def folder_name(label: str, corpus: DataConfig) -> str:
    """Return the name of the folder of shards that a run makes where data.path is not given.

    Of a `label` or a tokenizer that is a path, it has what a file name can have. Two corpora may
    share label and tokenizer, so the name ends with a hash of their file patterns.
    """
    name = f"{label}-{corpus.tokenizer.removesuffix('.json').removesuffix('/tokenizer')}"
    name = re.sub(r"[^\w.-]+", "-", name)
    name = re.sub(r"[-.]*-[-.]*", "-", name)[-150:].strip("-.") or "data"
    if not parse_source(corpus.source).of_files:
        return name
    written = json.dumps([corpus.source, corpus.files])
    return f"{name}-{hashlib.sha256(written.encode()).hexdigest()[:8]}"
