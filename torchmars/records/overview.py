"""Which runs a folder has, and how far each is."""

import contextlib
import math
import time
from pathlib import Path
from typing import Any, Literal

from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.core.files import is_locked
from torchmars.records.events import EVENTS_FILE
from torchmars.records.lines import METRICS_FILE
from torchmars.records.run import BITS, CONFIG_FILE, SPEED, Run, read_run

State = Literal["running", "stopped", "complete", "failed"]
# Where locks do not tell whether a run is running, one that has written this lately is.
SILENT_SECONDS = 600.0
BEGIN_AND_END = ("started", "stopped", "complete", "failed")


def overview(folder: Path) -> dict[str, Any]:
    """Return how far the run in `folder` is, by the last that it has written: facts by name.

    Numbers that are not known are None. `written` is in seconds since 1970; `machines` is how many
    the run was started on last, `left` and `joined` how often one has left and joined it. Raises
    `UserError` if the run is damaged, or none.
    """
    run = read_run(folder)
    kinds = [event.kind for event in run.events]
    starts = [event.facts for event in run.events if event.kind == "started"]
    return {
        "state": state_of(run),
        "step": run.last_step,
        "steps": run.steps,
        "loss": last_value(run, "train/loss"),
        "validation_loss": last_value(run, "validation/loss"),
        "bits_per_byte": last_value(run, BITS),
        "tokens_per_second": last_value(run, SPEED),
        "written": last_written(folder),
        "damaged_lines": run.damaged,
        "machines": starts[-1].get("machines") if starts else None,
        "left": kinds.count("left"),
        "joined": kinds.count("joined"),
    }


def last_value(run: Run, name: str) -> float | None:
    """Return the newest value of a measurement; None without one, or where it was not finite."""
    values = run.series[name].values[-1:] if name in run.series else ()
    return next((float(value) for value in values if math.isfinite(value)), None)


def is_complete(config: ResolvedConfig) -> bool:
    """Return whether the run of a config has made all the steps that the config asks for."""
    with contextlib.suppress(UserError):
        run = read_run(config.run.path)
        state, training = state_of(run), config.training
        if state == "complete":
            return run.steps >= training.steps
        return state == "stopped" and run.last_step >= training.last_step
    return False


def state_of(run: Run) -> State:
    """Return whether a run is running or, if it is not, how it ended.

    One that was killed, with no time to say so, has failed.
    """
    kinds = (event.kind for event in reversed(run.events))
    ended = next((kind for kind in kinds if kind in BEGIN_AND_END), None)
    locked = is_locked(run.folder / "lock")
    if locked is None:  # an end was told after the last start
        locked = (
            ended in (None, "started") and time.time() - last_written(run.folder) < SILENT_SECONDS
        )
    if locked:
        return "running"
    if ended == "stopped":
        return "stopped"
    return "complete" if ended == "complete" or run.checkpoints[-1:] >= [run.steps] else "failed"


def last_written(folder: Path) -> float:
    """Return when a run wrote to its files last, in seconds since 1970."""
    last = 0.0
    for name in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE):
        with contextlib.suppress(OSError):
            last = max(last, (folder / name).stat().st_mtime)
    return last


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs in `folder`, up to three levels deep, or itself if it is one."""
    runs: list[Path] = []
    for level in range(4):  # the last as comparisons/NAME/trials/RUN
        for file in sorted(folder.glob("*/" * level + CONFIG_FILE)):
            # A folder within a run is not a run of its own.
            if not any(other in file.parent.parents for other in runs):
                runs.append(file.parent)
    return sorted(runs)
