"""How ranks end after a step before the last: the run stops, or goes on with other machines."""

from collections.abc import Callable
from dataclasses import dataclass

from torchmars.config import ResolvedConfig
from torchmars.core.errors import EXIT_REGROUP, EXIT_STOPPED
from torchmars.training.checkpointer import Checkpointer, RunState


@dataclass(frozen=True)
class StepFlags:
    """The events before a step that concern all ranks, whichever rank notices them."""

    stop: bool
    """A signal asked for the end."""
    gone: bool
    """The run's folder is."""
    regroup: bool
    """The run goes on with other machines, from copies in memory."""
    save: bool
    """It goes on from a checkpoint."""


@dataclass(frozen=True)
class Ending:
    """How a rank ends after a step."""

    code: int
    """The exit code that it leaves for its launcher."""
    save: bool = False
    """Whether a checkpoint has to be complete. Else a copy in memory has to, where there is one."""


STOP = Ending(EXIT_STOPPED, save=True)
REGROUP, SAVE = Ending(EXIT_REGROUP), Ending(EXIT_REGROUP, save=True)


class Endings:
    """Whether and how the ranks end after a step before the last.

    Every rank makes the same calls.
    """

    def __init__(self, config: ResolvedConfig, checkpointer: Checkpointer) -> None:
        self.config, self.checkpointer = config, checkpointer
        self.regroups_from = 0
        """The first step after which the run may go on with other machines."""

    def after_step(self, step: int, flags: StepFlags) -> Ending | None:
        """Return how this rank ends after `step`, which was just made; None if it goes on."""
        if step == self.config.training.last_step:
            return None
        if flags.stop:
            return STOP
        if step < self.regroups_from:
            return None
        return SAVE if flags.save else REGROUP if flags.regroup else None

    def if_kept(
        self, ending: Ending, state: RunState, saved: bool, save: Callable[[], None]
    ) -> Ending | None:
        """Keep the run for the ranks that go on from here; return `ending`, None if that failed.

        In memory or else in a checkpoint, which may be `saved` already. If it fails, these ranks
        make other steps, for as long as to a checkpoint.
        """
        if ending is STOP:  # the last save tells whether it failed
            return ending
        if not ending.save:
            self.checkpointer.keep(state)
            if self.checkpointer.is_kept():
                return ending
        if not saved:
            save()
        self.checkpointer.saver.wait()
        if not self.checkpointer.saver.error:
            return ending
        self.regroups_from = state.step + max(1, self.config.checkpoint.interval)
        return None
