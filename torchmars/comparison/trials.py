"""How far a trial is, by the files of its run; and the files that it leaves."""

import contextlib
import math
import os
from pathlib import Path

from torchmars.checkpoint.folder import checkpoints, delete_all, leftovers, lies_in
from torchmars.comparison.results import LossCurve, State, TrialResult
from torchmars.comparison.study import Trial
from torchmars.config.load import config_text
from torchmars.core.console import say
from torchmars.core.files import open_file, write_durably
from torchmars.records.run import Run, read_run

CONFIG_FILE = "trial.toml"
OUTPUT_FILE = "output.log"
FAILED_OUTPUT_FILE = "failed.log"  # the output of the try that failed last
FAILURE_FILE = "failure.txt"  # why the run ended without being complete, in a line

LONGEST_REASON = 300  # characters
BYTES_READ = 2**16  # of the end of a log
# How a run's own guards end it: their errors say this.
LOWER_LR = "lower optimizer.lr"
NO_CURVE = LossCurve([], [])


def write_trial(trial: Trial) -> Path:
    """Write the config file of a trial; return it. Raises `OSError`, and `UserError` for links."""
    trial.config.run.check_links()
    trial.folder.mkdir(parents=True, exist_ok=True)
    file = trial.folder / CONFIG_FILE
    write_durably(file, config_text(trial.config))
    return file


def read_trial(trial: Trial) -> TrialResult:
    """Return how far a trial is.

    One that keeps its last checkpoint is done once that is written, or once its run said that it is
    complete: it may have been so at a start that kept none.
    """
    config = trial.config
    run = read_run(trial.folder) if (trial.folder / "config.toml").is_file() else None
    curve, steps = validation_curve(run) if run else (NO_CURVE, 0)
    state: State = "pending"
    reason, loss = "", None
    failure = trial.folder / FAILURE_FILE
    if run and steps == config.training.steps and (not config.checkpoint.at_end or is_saved(run)):
        loss = curve.losses[-1]
        state = "diverged" if loss is None else "done"
        reason = "its last validation loss is not finite" if loss is None else ""
    elif failure.exists():
        reason = failure.read_text(encoding="utf-8").strip()
        state = "diverged" if LOWER_LR in reason else "failed"
    return TrialResult(
        trial.name,
        trial.contender,
        trial.settings,
        config.run.seed,
        state,
        reason,
        loss,
        NO_CURVE if state == "pending" else curve,
        f"{trial.folder.parent.name}/{trial.folder.name}",
    )


def validation_curve(run: Run) -> tuple[LossCurve, int]:
    """Return the validation losses of a run, and the step of the last one."""
    series = run.series.get("validation/loss")
    if series is None:
        return NO_CURVE, 0
    losses = [value if math.isfinite(value) else None for value in series.values.tolist()]
    return LossCurve(run.tokens(series.steps).tolist(), losses), int(series.steps[-1])


def is_saved(run: Run) -> bool:
    """Return whether a run has written its last checkpoint, which may be deleted by now."""
    return run.steps in run.checkpoints or any(each.kind == "complete" for each in run.events)


def end_trial(trial: Trial, code: int | None) -> TrialResult:
    """Return the result of a trial whose run has ended, and delete files that are not needed.

    `code` is its exit code, None if it is not known.
    """
    result = read_trial(trial)
    if result.state == "pending":
        how = "" if code is None else f"exit code {code}: "
        write_durably(trial.folder / FAILURE_FILE, f"{how}{last_error(trial)}\n")
        result = read_trial(trial)
    delete_checkpoints(trial, result)
    return result


def delete_checkpoints(trial: Trial, result: TrialResult) -> None:
    """Delete the checkpoints of a trial that needs them no longer."""
    if result.state == "diverged" or result.state == "done" and not trial.config.checkpoint.at_end:
        folder = trial.config.run.path / "checkpoints"
        if not lies_in(folder, trial.config.run.path):  # a link, whoever has made it
            return
        delete_all([*checkpoints(folder), *leftovers(folder)], lambda text: say(text, error=True))
        with contextlib.suppress(OSError):
            folder.rmdir()


def last_error(trial: Trial) -> str:
    """Return a run's own words on its failure, in a line."""
    lines = last_lines(trial.folder / OUTPUT_FILE)
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    said = lines[errors[-1] :] if errors else lines[-1:]
    # Of a crash: the rank, its last lines, how it ended.
    told = [line for line in said if not line.startswith("it ended with exit code")]
    if not told:
        return "it printed nothing"
    reason = told[-1] if " failed first; " in told[0] else told[0]
    return reason.removeprefix("error: ")[:LONGEST_REASON]


def last_lines(file: Path) -> list[str]:
    """Return the last lines of a file that are not empty, spaces made single; none without it."""
    try:
        with open_file(file) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - BYTES_READ))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [" ".join(line.split()) for line in lines if line.strip()]


def forget_failure(trial: Trial) -> None:
    """Let a trial that failed be tried again. One that diverged would do so again."""
    failure, output = trial.folder / FAILURE_FILE, trial.folder / OUTPUT_FILE
    with contextlib.suppress(FileNotFoundError):
        if LOWER_LR in failure.read_text(encoding="utf-8"):
            return
        # The next try may end without a word. Its reason must not be this one.
        with contextlib.suppress(FileNotFoundError):
            output.rename(trial.folder / FAILED_OUTPUT_FILE)
        failure.unlink()
