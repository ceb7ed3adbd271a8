"""The trials of a comparison, run until all have ended."""

import time
from collections.abc import Callable, Collection
from typing import Protocol

from torchmars.cluster.process import StopSignals
from torchmars.comparison.local import LocalTrials
from torchmars.comparison.results import TrialResult
from torchmars.comparison.slurm import SlurmTrials
from torchmars.comparison.study import Study, Trial, TrialPlan
from torchmars.comparison.trials import delete_checkpoints, end_trial, forget_failure, read_trial
from torchmars.core.console import say
from torchmars.core.words import counted
from torchmars.data.progress_bar import progress_bar
from torchmars.records.lines import METRICS_FILE, last_step

POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0  # between two looks at how far the trials are


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
        progress = TrialsProgress(study, results, plans)
        with progress.bar:
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


class TrialsProgress:
    """A bar over the steps of all trials, with the time that is left."""

    def __init__(
        self, study: Study, result: Callable[[Trial], TrialResult], plans: list[TrialPlan]
    ) -> None:
        self.study, self.result = study, result
        self.looked = 0.0
        self.steps: dict[str, int] = {}  # that a trial has made, by its name
        done = self.look(plans, [])
        self.bar = progress_bar("trials", self.total(plans), " steps", done=done)

    def look(self, plans: list[TrialPlan], running: Collection[str]) -> int:
        """Return the steps that the trials have made. Of one that has begun, its files tell."""
        for trial in (trial for plan in plans for trial in plan.trials):
            if trial.name in running or trial.name not in self.steps:
                self.steps[trial.name] = last_step(trial.folder / METRICS_FILE)
        return sum(self.steps.values())

    def total(self, plans: list[TrialPlan]) -> int:
        """Return the steps that all trials will have made, as far as is known."""
        ended, left = self.count(plans)
        made = sum(self.steps[trial.name] for trial in ended)
        return made + left * self.study.base.training.steps

    def count(self, plans: list[TrialPlan]) -> tuple[list[Trial], int]:
        """Return the trials that have ended, and how many are left as far as is known."""
        trials = [trial for plan in plans for trial in plan.trials]
        ended = [trial for trial in trials if self.result(trial).state != "pending"]
        # The trials of the other seeds are not yet known of a contender that is being tuned.
        others = sum(not plan.tuned for plan in plans) * (len(self.study.seeds) - 1)
        others *= self.study.seed_trials
        return ended, len(trials) - len(ended) + others

    def show(self, plans: list[TrialPlan], running: Collection[str], now: bool = False) -> None:
        """Show how far the trials are, from time to time or `now`."""
        if now or time.monotonic() > self.looked + LOOK_SECONDS:
            done = self.look(plans, running)
            self.bar.total = self.total(plans)
            self.bar.set_postfix_str(f"{len(running)} running", refresh=False)
            self.bar.update(done - self.bar.n)
            self.looked = time.monotonic()

    def tell(self, results: list[TrialResult], plans: list[TrialPlan]) -> None:
        """Print how some trials have ended."""
        names = [each.name for each in results]
        self.show(plans, names, now=True)
        ended, left = self.count(plans)
        for each in results:
            how = each.reason and f"{each.state}: {each.reason}"
            said = how or f"validation loss {each.loss:.4f}"
            self.bar.clear()
            say(f"{each.name}: {said} ({len(ended)} of {counted(len(ended) + left, 'trial')})")
