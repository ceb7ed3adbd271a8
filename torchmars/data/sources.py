"""The files that a corpus was tokenised from, and whether they are still the same.

`sources.json` beside the shards has their names, as the config gave them, sizes and times, and the
SHA-256 of each file where the corpus is not too large to be read once more for it.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.core.files import read_text, sha256, write_durably
from torchmars.core.places import place
from torchmars.core.typed import make, parse_json
from torchmars.data.corpus import source_files
from torchmars.data.corpus_plan import CorpusPlan
from torchmars.storage.objects import size_and_time

NAME = "sources.json"
LARGEST_HASHED = 2**30  # bytes of a corpus whose files are hashed


@dataclass
class SourceFile:
    """A file of a corpus: its size in bytes, when it was last written, and its SHA-256."""

    size: int
    mtime_ns: int
    sha256: str | None = None
    """None for a file of a large corpus."""


def write_sources(folder: Path, plan: CorpusPlan) -> None:
    """Write the sources of the shards beside them in `folder`."""
    sources: dict[str, SourceFile] = {}
    for each in (each for piece in plan.pieces for each in piece):
        if each.mtime_ns is None:
            continue
        source = sources.setdefault(each.name, SourceFile(0, each.mtime_ns))
        source.size += each.size  # of all its ranges
    for name, source in sources.items():
        path = place(name, pattern=True)
        if not isinstance(path, Path):  # it would be read once more
            continue
        if plan.size <= LARGEST_HASHED and change(path, source) is None:
            source.sha256 = sha256(path)
    entries = {name: asdict(source) for name, source in sources.items()}
    write_durably(folder / NAME, json.dumps(entries, indent=1) + "\n")


def warning(config: ResolvedData) -> str | None:
    """Return a line on how the corpus differs from the sources of the shards in data.path.

    None if it does not differ. A difference is no mistake: shards are all that a run needs, and
    a run that has begun must keep them. So the text may also have been removed: None if
    none of its files exists any more.
    """
    folder = Path(config.path)
    try:
        entries = parse_json(read_text(folder / NAME))
        sources = {
            place(name, pattern=True): make(SourceFile, entry) for name, entry in entries.items()
        }
    except FileNotFoundError:  # the tokens are another program's
        return None
    except (OSError, ValueError, AttributeError, UserError) as error:
        return (
            f"{folder / NAME} cannot be read ({error}): whether the corpus has changed is not known"
        )
    # An object store is not asked: neither at each start, nor because anybody's file names it.
    local = {file: source for file, source in sources.items() if isinstance(file, Path)}
    if not any(file.exists() for file in local):
        return None
    changes = [f"{file} {what}" for file, source in local.items() if (what := change(file, source))]
    with contextlib.suppress(UserError):  # a pattern that matches nothing: its files are gone
        named = config.files or parse_source(config.source).glob
        added = set(source_files(config)) - set(sources) if named else set()
        changes += [f"{file} is new" for file in sorted(added)]
    if not changes:
        return None
    some = ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
    return (
        f"the corpus is not what {folder} was made from: {some}. Runs read what was "
        "tokenised; for the corpus as it is now set data.path to a new folder, and run.name to "
        "a new run"
    )


def change(file: Path, source: SourceFile) -> str | None:
    """Return how a file differs from `source`; None if its content is the same.

    Reads the file only where it was written to.
    """
    try:
        size, changed = size_and_time(file)
        if size != source.size:
            return "has changed"
        if changed == source.mtime_ns:
            return None
        if source.sha256 is None:
            return "was written to"
        return None if sha256(file) == source.sha256 else "has changed"
    except OSError:
        return "is gone"
