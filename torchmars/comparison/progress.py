"""How far the trials of a comparison are: a bar on a terminal, lines in a log."""

import time
from collections.abc import Callable, Collection

from torchmars.comparison.results import TrialResult
from torchmars.comparison.study import Study, Trial, TrialPlan
from torchmars.core.console import say
from torchmars.core.words import counted
from torchmars.data.progress_bar import ProgressBar
from torchmars.metrics.journal import METRICS_FILE, last_step

SECONDS = 2.0  # between two looks at the trials


class TrialsProgress(ProgressBar):
    """A bar over the steps of all trials, with the time that is left."""

    def __init__(
        self, study: Study, result: Callable[[Trial], TrialResult], plans: list[TrialPlan]
    ) -> None:
        self.study, self.result = study, result
        self.looked = 0.0
        self.steps: dict[str, int] = {}  # that a trial has made, by its name
        done = self.look(plans, [])
        super().__init__("trials", self.total(plans), done, " steps")

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
        if now or time.monotonic() > self.looked + SECONDS:
            done = self.look(plans, running)
            self.bar.total = self.total(plans)
            self.bar.set_postfix_str(f"{len(running)} running", refresh=False)
            self.add(done - self.bar.n)
            self.looked = time.monotonic()

    def tell(self, results: list[TrialResult], plans: list[TrialPlan]) -> None:
        """Print how some trials have ended."""
        names = [each.name for each in results]
        self.show(plans, names, now=True)
        ended, left = self.count(plans)
        for each in results:
            how = each.reason and f"{each.state}: {each.reason}"
            said = how or f"validation loss {each.loss:.4f}, {each.seconds:,.0f} s"
            self.bar.clear()
            say(f"{each.name}: {said} ({len(ended)} of {counted(len(ended) + left, 'trial')})")
