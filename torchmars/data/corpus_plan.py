"""What a corpus is prepared with: settings and pieces, kept beside the shards while they are made.

Tasks that work side by side, and a start that resumes, must agree on it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchmars.cluster.scheduler import TaskArray
from torchmars.config import ResolvedData
from torchmars.config.source import parse_source
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import read_text, write_durably
from torchmars.core.typed import make, parse_json
from torchmars.data.corpus import Piece, Sizes, corpus_pieces
from torchmars.data.rows import check_columns
from torchmars.data.tokenizer import load_tokenizer

NAME = "plan.json"
ARRAY = "plan.json.array"
SETTINGS = ("source", "files", "tokenizer", "validation_fraction")


@dataclass
class CorpusPlan:
    """Settings by name, and the pieces of the corpus."""

    settings: dict[str, Any]
    pieces: list[Piece]

    @property
    def size(self) -> int:
        """Bytes of the corpus, or shards of a data set."""
        return sum(self.piece_size(number) for number in range(len(self.pieces)))

    def piece_size(self, number: int) -> int:
        """Return the bytes of a piece; 1 for a shard of a data set."""
        return sum(each.size for each in self.pieces[number])


def plan_corpus(config: ResolvedData, sizes: Sizes) -> CorpusPlan:
    """Return the plan for the corpus as it is now. Raises `UserError`."""
    settings = {f"data.{name}": getattr(config, name) for name in SETTINGS}
    tokenizer = load_tokenizer(config.tokenizer, config.begin_token)
    if tokenizer.sha256 is not None:
        settings["data.tokenizer"] = f"a file of SHA-256 {tokenizer.sha256}"  # whichever path
    begin = tokenizer.begin_token
    settings["data.begin_token"] = None if begin is None else f"token {begin}"
    return CorpusPlan(settings | asdict(sizes), corpus_pieces(config, sizes))


def has_plan(folder: Path) -> bool:
    """Return whether a folder was begun, and is not complete."""
    return (folder / NAME).exists()


def begin_plan(plan: CorpusPlan, folder: Path) -> None:
    """Write the plan to a folder that has none.

    Raises `UserError` if the folder was begun with another one.
    """
    file = folder / NAME
    remedy = f"set it back, or remove the folder {folder} to start over"
    if not has_plan(folder):
        source = parse_source(plan.settings["data.source"])
        if source.kind == "parquet":  # not when the work on all files before is done
            check_columns([each.name for piece in plan.pieces for each in piece], source.field)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps(asdict(plan)))
        return
    try:
        begun = make(CorpusPlan, parse_json(read_text(file)))
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} cannot be read ({error}): {remedy}") from None
    for name, wanted in plan.settings.items():
        if (found := begun.settings.get(name)) != wanted:
            raise UserError(
                f"{folder} was begun with {name} = {json.dumps(found)}, now it is "
                f"{json.dumps(wanted)}: {remedy}"
            )
    old, new = ({each for piece in made.pieces for each in piece} for made in (begun, plan))
    if changed := sorted({each.name for each in old ^ new}):
        some = f"{changed[0]} and {len(changed) - 1} more" if changed[1:] else changed[0]
        raise UserError(
            f"the corpus has changed since {folder} was begun: {some}: put it back, or remove the "
            "folder to start over"
        )


def place_in_array(folder: Path, number: int, array: TaskArray | None) -> tuple[int, int]:
    """Return which of how many tasks the one of a number is, in the array that began a folder.

    Some tasks of it that are submitted again make an `array` of their own, or one whose numbers do
    not follow each other, None. Raises `UserError` for a number of none.
    """
    if not has_plan(folder):  # another task has made the rest
        return 0, 1
    file, remedy = folder / ARRAY, "say which of how many tasks this is by --task and --tasks"
    try:
        begun = make(TaskArray, parse_json(read_text(file))) if file.exists() else None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} cannot be read ({error}): {remedy}") from None
    if array and (begun is None or None not in (array.place(begun.first), array.place(begun.last))):
        if array != begun:
            write_durably(file, json.dumps(asdict(array)))
        begun = array
    if begun and (place := begun.place(number)) is not None:
        if array != begun:
            say(f"this is task {place} of the {begun.count} that began {folder}: all must be done")
        return place, begun.count
    known = f"were {begun.first} to {begun.last}" if begun else "are not known"
    raise UserError(f"task {number} of the array: the tasks that began {folder} {known}: {remedy}")
