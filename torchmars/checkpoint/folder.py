"""A run's folder of checkpoints: which there are, and how one is deleted."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torchmars.core.files import PARTIAL, remove, sync_folder

# What a crash can leave. A save is `.partial` until it is complete. What is to be deleted is
# renamed first, so that half of it is never taken for a checkpoint.
DELETED, DAMAGED = ".deleted", ".damaged"
# The names that runs make. Everything else in the folder is the user's and is left alone.
STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
SUFFIXES = "|".join(map(re.escape, (PARTIAL, DELETED, DAMAGED)))
LEFTOVER = re.compile(rf"{STEP.pattern}(-\d+)?({SUFFIXES})")  # with a number: see `clear_path`


def step_folder(folder: Path, step: int) -> Path:
    """Return the checkpoint of `step` in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's `checkpoints` folder, oldest first.

    Each was complete when it appeared. Whether it is still good, `manifest.verify` checks.
    """
    return sorted(
        (path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()),
        key=step_of,
    )


def leftovers(folder: Path) -> list[Path]:
    """Return what crashed saves and deletions left, and what was set aside.

    They are folders, files or links.
    """
    return sorted(path for path in folder.glob("step-*") if LEFTOVER.fullmatch(path.name))


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Rename a checkpoint durably, so that it is not taken for one. Return its new path."""
    target = clear_path(checkpoint.with_name(checkpoint.name + suffix))
    checkpoint.rename(target)
    sync_folder(checkpoint.parent)
    return target


def clear_path(leftover: Path) -> Path:
    """Delete a leftover and return its path; one with a number where it cannot be deleted."""
    number, path = 0, leftover
    while True:
        with contextlib.suppress(OSError):
            remove(path)
        if not os.path.lexists(path):
            return path
        number += 1
        path = leftover.with_stem(f"{leftover.stem}-{number}")


def delete(path: Path) -> None:
    """Delete a checkpoint or a leftover. Of a linked one delete the link alone.

    A crash in the middle leaves something that is not taken for a checkpoint.
    """
    remove(path if LEFTOVER.fullmatch(path.name) else set_aside(path, DELETED))


def delete_all(paths: Iterable[Path], warn: Callable[[str], None]) -> list[Path]:
    """Delete checkpoints and leftovers. Warn of those that cannot be deleted, and return them."""
    undeletable = []
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            warn(f"warning: cannot delete {path}: {error.strerror}")
            undeletable.append(path)
    return undeletable
