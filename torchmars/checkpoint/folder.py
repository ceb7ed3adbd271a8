"""A run's folder of checkpoints: which there are and which are kept."""

import math
import re
import shutil
from pathlib import Path

from torchmars.config import CheckpointConfig, Config
from torchmars.files import PARTIAL, sync_folder

STEP = re.compile(r"step-(\d{8,})")
# What a crash can leave. A save is `.partial` until it is complete; what is deleted is renamed first, so that half of it is never taken for good.
DELETED, DAMAGED = ".deleted", ".damaged"


def run_folder(config: Config) -> Path:
    """The folder of the run that `config` describes."""
    return Path(config.run.folder) / config.run.name


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
