"""A run's folder of checkpoints: which there are and which are kept."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torchmars.config import CheckpointConfig
from torchmars.core.files import PARTIAL, remove, sync_folder

# What a crash can leave. A save is `.partial` until it is complete; what is deleted is renamed first, so that half of it is never taken for good.
DELETED, DAMAGED = ".deleted", ".damaged"
# The names that runs make. Everything else in the folder is the user's and is left alone.
STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
SUFFIXES = "|".join(map(re.escape, (PARTIAL, DELETED, DAMAGED)))
LEFTOVER = re.compile(rf"{STEP.pattern}(-\d+)?({SUFFIXES})")  # with a number: see `vacated`


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of `step` in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(STEP.fullmatch(checkpoint.name)[1])


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's `checkpoints` folder, oldest first. Each was complete when it appeared; whether it still is good
    is `manifest.verify`'s to say."""
    return sorted(
        (path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()),
        key=step_of,
    )


def leftovers(folder: Path) -> list[Path]:
    """What crashed saves and deletions left, and what was set aside: folders, files or links."""
    return sorted(path for path in folder.glob("step-*") if LEFTOVER.fullmatch(path.name))


def dispensable(steps: list[int], losses: dict[int, float], config: CheckpointConfig) -> list[int]:
    """Which of the checkpoints of `steps` `config` does not ask to keep. `losses`: the validation losses that are known, by step."""
    kept = set(sorted(steps)[-config.keep_last :])  # all of them for 0
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    if config.keep_best and losses:
        kept.add(min(losses, key=lambda step: (losses[step], step)))
    return sorted(set(steps) - kept)


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Take a checkpoint out of sight under another name, durably; returns its new path."""
    target = vacated(checkpoint.with_name(checkpoint.name + suffix))
    checkpoint.rename(target)
    sync_folder(checkpoint.parent)
    return target


def vacated(leftover: Path) -> Path:
    """A free name: `leftover` once it is deleted, with a number where it cannot be."""
    for number in itertools.count():
        path = leftover.with_stem(f"{leftover.stem}-{number}") if number else leftover
        with contextlib.suppress(OSError):
            remove(path)
        if not os.path.lexists(path):
            return path


def delete(path: Path) -> None:
    """Delete a checkpoint or a leftover; of a linked one the link alone.

    A crash in the middle leaves something that is not taken for a checkpoint.
    """
    remove(path if LEFTOVER.fullmatch(path.name) else set_aside(path, DELETED))


def delete_all(paths: Iterable[Path], warn: Callable[[str], None]) -> list[Path]:
    """Delete checkpoints and leftovers. Warn of those that cannot be deleted, and return them."""
    stuck = []
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            warn(f"warning: cannot delete {path}: {error.strerror}")
            stuck.append(path)
    return stuck
