"""A run's folder of checkpoints: which there are."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torchmars.checkpoint.storage import DAMAGED, DELETED, LOCAL, Storage
from torchmars.core.files import PARTIAL

# The names that runs make. Everything else in the folder is the user's and is left alone.
STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
SUFFIXES = "|".join(map(re.escape, (PARTIAL, DELETED, DAMAGED)))
LEFTOVER = re.compile(rf"{STEP.pattern}(-\d+)?({SUFFIXES})")


def step_folder(folder: Path, step: int) -> Path:
    """Return the checkpoint of `step` in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: Path, storage: Storage = LOCAL) -> list[Path]:
    """Return the checkpoints in a run's `checkpoints` folder, oldest first.

    Each was complete when it appeared. Whether it is still good, `manifest.verify` checks.
    """
    found = storage.list(folder).items()
    return sorted(
        (folder / name for name, is_folder in found if is_folder and STEP.fullmatch(name)),
        key=step_of,
    )


def leftovers(folder: Path, storage: Storage = LOCAL) -> list[Path]:
    """Return what crashed saves and deletions left, and what was set aside.

    They are folders, files or links.
    """
    return sorted(folder / name for name in storage.list(folder) if LEFTOVER.fullmatch(name))


def delete_all(
    paths: Iterable[Path], warn: Callable[[str], None], storage: Storage = LOCAL
) -> list[Path]:
    """Delete checkpoints and leftovers. Warn of those that cannot be deleted, and return them."""
    undeletable = []
    for path in paths:
        try:
            storage.delete(path)
        except OSError as error:
            warn(f"warning: cannot delete {path}: {error.strerror}")
            undeletable.append(path)
    return undeletable
