"""The trials of a comparison, run until all have ended."""

import time
from collections.abc import Callable, Collection
from typing import Protocol

from torchmars.cluster.signals import StopSignals
from torchmars.comparison.local import LocalTrials
from torchmars.comparison.progress import TrialsProgress
from torchmars.comparison.results import TrialResult
from torchmars.comparison.slurm import SlurmTrials
from torchmars.comparison.study import Study, Trial, TrialPlan
from torchmars.comparison.trials import delete_checkpoints, end_trial, forget_failure, read_trial
from torchmars.core.console import say

POLL_SECONDS = 0.2


class Runner(Protocol):
    """A runner of trials: this machine, or a cluster."""

    @property
    def running(self) -> Collection[str]:
        """The names of the trials that run."""

    def describe(self) -> str:
        """Return how trials are run, in words."""

    def prepare(self) -> None:
        """Make the shards of all trials."""

    def start(self, trials: list[Trial]) -> None:
        """Start as many of the remaining trials as there is room for, in order."""

    def ended(self) -> list[tuple[Trial, int | None]]:
        """Return the trials that have ended since, and their exit codes where these are known."""

    def stop(self) -> str:
        """Stop the trials that must not outlive this process; return a line on what follows."""


def make_runner(study: Study, jobs: int, slurm: bool) -> Runner:
    """Return a runner of `jobs` trials at a time here, or on a cluster. Raises `UserError`."""
    return SlurmTrials(study) if slurm else LocalTrials(study, jobs)


class Results:
    """The results of the trials of a study, as their files had them when they were read."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.known: dict[str, TrialResult] = {}

    def __call__(self, trial: Trial) -> TrialResult:
        """Return the result of a trial. One that failed at an earlier start is tried again."""
        if trial.name not in self.known:
            forget_failure(trial)
            self.known[trial.name] = read_trial(trial)
            delete_checkpoints(trial, self.known[trial.name])
        return self.known[trial.name]

    def end(self, trial: Trial, code: int | None) -> None:
        """Take in that the run of a trial has ended with an exit code, None if not known."""
        self.known[trial.name] = end_trial(trial, code)

    def plans(self) -> list[TrialPlan]:
        """Return the trials of each contender, as far as they are known."""
        return [self.study.plan(each, self) for each in self.study.contenders]


def run_trials(
    study: Study, results: Results, runner: Runner, changed: Callable[[], object]
) -> bool:
    """Run the trials of a study that have not ended; return whether all have.

    Else a signal has stopped it. Calls `changed` whenever one has ended.
    """
    plans = results.plans()
    with StopSignals() as signals:
        with TrialsProgress(study, results, plans) as progress:
            while (left := pending(plans, results)) and signals.received is None:
                runner.start(left)
                time.sleep(POLL_SECONDS)
                if over := runner.ended():
                    for trial, code in over:
                        results.end(trial, code)
                    plans = results.plans()
                    progress.tell([results(trial) for trial, _ in over], plans)
                    changed()
                progress.show(plans, runner.running)
        if left:
            how = runner.stop()
            say(f"stopped by {signals.received}: {how}; the same command resumes", error=True)
        while runner.running:  # their end is read at the next start
            time.sleep(POLL_SECONDS)
            runner.ended()
    return not left


def pending(plans: list[TrialPlan], results: Results) -> list[Trial]:
    """Return the trials that have not ended: first the grid, then other seeds."""
    left = [trial for plan in plans for trial in plan.trials if results(trial).state == "pending"]
    return sorted(left, key=lambda trial: trial.config.run.seed)
