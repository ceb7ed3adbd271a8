"""A run's folder of checkpoints: which there are, which are kept, and files that survive a crash."""

import contextlib
import fcntl
import math
import os
import re
import shutil
import time
from pathlib import Path

from torchmars.config import CheckpointConfig, Config
from torchmars.console import say
from torchmars.errors import UserError

STEP = re.compile(r"step-(\d{8,})")
# What a crash can leave. A save is `.partial` until it is complete; what is deleted is renamed first, so that half of it is never taken for good.
PARTIAL, DELETED, DAMAGED = ".partial", ".deleted", ".damaged"


def run_folder(config: Config) -> Path:
    """The folder of the run that `config` describes."""
    return Path(config.run.folder) / config.run.name


def lock(file: Path, doing: str, patience: float = 60.0) -> None:
    """Keep other processes from what this one is `doing` for as long as it lives.

    Waits `patience` seconds for one that is about to end. Raises `UserError` where it does not.
    """
    with contextlib.suppress(OSError):  # a folder that cannot be written, as will be said later, or a file system without locks
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        deadline, told = time.monotonic() + patience, False
        while True:
            try:
                return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: that would live on in a rank's helpers
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise UserError(f"another process is {doing}: stop it first") from None
                if not told:
                    say(f"waiting for another process that is {doing}")
                told = True
                time.sleep(0.5)


def checkpoints_folder(config: Config) -> Path:
    """Where that run's checkpoints are."""
    return run_folder(config) / "checkpoints"


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of `step` in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(STEP.fullmatch(checkpoint.name)[1])


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's `checkpoints` folder, oldest first. Each was complete when it appeared; whether it still is good
    is `manifest.verify`'s to say."""
    return sorted((path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()), key=step_of)


def leftovers(folder: Path) -> list[Path]:
    """What crashed saves and deletions left, and what was set aside as damaged."""
    return sorted(path for path in folder.glob("step-*") if path.suffix in (PARTIAL, DELETED, DAMAGED))


def dispensable(steps: list[int], losses: dict[int, float], config: CheckpointConfig) -> list[int]:
    """Which of the checkpoints of `steps` `config` does not ask to keep. `losses`: the validation losses that are known, by step."""
    kept = set(sorted(steps)[-config.keep_last:])  # all of them for 0
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    if config.keep_best and losses:
        kept.add(min(losses, key=lambda step: (losses[step], step)))
    return sorted(set(steps) - kept)


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Take a checkpoint out of sight under another name, durably; returns its new path."""
    target = checkpoint.with_name(checkpoint.name + suffix)
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)
    sync_folder(checkpoint.parent)
    return target


def delete(path: Path) -> None:
    """Delete a checkpoint or a leftover. A crash in the middle leaves something that is not taken for a checkpoint."""
    shutil.rmtree(path if path.suffix in (PARTIAL, DELETED, DAMAGED) else set_aside(path, DELETED))


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one, whole."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
