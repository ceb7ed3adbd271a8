"""A run's folder of checkpoints: which there are."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path, PurePath
from typing import TypeVar

from torchmars.config.load import read_toml
from torchmars.config.sections import RunConfig
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL, path_problem
from torchmars.core.places import place
from torchmars.storage import storage_of
from torchmars.storage.local import DEFAULT
from torchmars.storage.storage import DAMAGED, DELETED

P = TypeVar("P", bound=PurePath)

# The names that runs make. Everything else in the folder is the user's and is left alone.
STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
SUFFIXES = "|".join(map(re.escape, (PARTIAL, DELETED, DAMAGED)))
LEFTOVER = re.compile(rf"{STEP.pattern}(-\d+)?({SUFFIXES})")
NO_CHECKPOINT = "is neither a checkpoint nor a run with one"


def folder_of(run: PurePath) -> PurePath:
    """Return the folder of checkpoints that a path stands for.

    It names a run's folder, whose config may name another place, or the folder itself. A line says
    so where that is a store's: the config may be anybody's. Raises `UserError`.
    """
    if not isinstance(run, Path):
        return run
    table, file = None, run / "config.toml"
    with contextlib.suppress(UserError):  # it is missing, or damaged
        table = read_toml(file).get("checkpoint")
    named = table.get("folder") if isinstance(table, dict) else None
    if isinstance(named, str):
        folder = place(named, f"{file}: checkpoint.folder")
        check_path(folder, f"{file}: checkpoint.folder")
        tell_once(file, folder)
        return folder
    return run if checkpoints(run) else run / DEFAULT


def no_checkpoint(run: PurePath, what: str = NO_CHECKPOINT) -> UserError:
    """Return the error of a path at which there is no checkpoint, with the reason and a remedy."""
    if isinstance(run, Path) and (wrong := path_problem(run, "folder")):
        what += f" ({wrong})"
    elif isinstance(run, Path) and not run.exists():
        what += " (it does not exist)"
    return UserError(f"{run} {what}: {other_run(run)}")


def other_run(run: PurePath, else_name: str = "name one that torchmars runs lists") -> str:
    """Return the remedy for a path at which there is no run."""
    meant = Path(RunConfig.folder) / run
    if isinstance(run, Path) and not os.path.lexists(run) and os.path.isdir(meant):
        return f"did you mean {meant}?"
    return else_name


@cache
def tell_once(config: Path, folder: PurePath) -> None:
    """Say that the checkpoints of a run are in a store, where they are."""
    if not isinstance(folder, Path):
        say(f"the checkpoints are read from {folder}, as {config} says", error=True)


def check_path(folder: PurePath, option: str) -> None:
    """Raise `UserError` if a disk cannot have a folder that `option` names."""
    if isinstance(folder, Path) and (wrong := path_problem(folder, "folder")):
        raise UserError(f"{option} cannot be a folder ({wrong}): name another one")


def check_place(folder: PurePath, run: Path) -> None:
    """Raise `UserError` if the run of the folder `run` must not have its checkpoints."""
    check_path(folder, "checkpoint.folder")
    whole = folder.resolve() if isinstance(folder, Path) else folder
    wrong = ""
    if any(STEP.fullmatch(part) or LEFTOVER.fullmatch(part) for part in whole.parts):
        wrong = "lies in a checkpoint, and would be deleted with it"
    elif isinstance(whole, Path) and whole != run.resolve():
        if all(os.path.exists(whole / name) for name in ("config.toml", "lock")):
            wrong = "is the folder of another run"
    if wrong:
        raise UserError(f"{folder} {wrong}: set checkpoint.folder to another folder")


def lies_in(path: PurePath, run: Path) -> bool:
    """Return whether a checkpoint, or a folder of them, is in a run's folder: no link leads out."""
    return isinstance(path, Path) and path.resolve().is_relative_to(run.resolve())


def step_folder(folder: P, step: int) -> P:
    """Return the checkpoint of `step` in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: PurePath) -> int:
    """Return the step of a checkpoint, or of its remains, by its name."""
    return int(checkpoint.name.split("-")[1].partition(".")[0])


def checkpoints(folder: P) -> list[P]:
    """Return the checkpoints in a run's `checkpoints` folder, oldest first.

    Each was complete when it appeared. Whether it is still good, `manifest.verify` checks.
    """
    found = storage_of(folder).list(folder).items()
    return sorted(
        (folder / name for name, is_folder in found if is_folder and STEP.fullmatch(name)),
        key=step_of,
    )


def leftovers(folder: P) -> list[P]:
    """Return leftovers of crashed saves and deletions, and checkpoints that were set aside.

    They are folders, files or links.
    """
    found = storage_of(folder).list(folder)
    return sorted(folder / name for name in found if LEFTOVER.fullmatch(name))


def delete_all(paths: Iterable[P], warn: Callable[[str], None]) -> list[P]:
    """Delete checkpoints and leftovers. Warn of those that cannot be deleted, and return them."""
    undeletable = []
    for path in paths:
        try:
            storage_of(path).delete(path)
        except FileNotFoundError:
            pass  # a run and a prune beside it may delete the same
        except OSError as error:
            warn(f"warning: cannot delete {path}: {error.strerror}")
            undeletable.append(path)
    return undeletable
