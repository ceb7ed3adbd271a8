"""How ranks end after a step before the last: the run stops, or goes on with other machines."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.core.errors import EXIT_LEFT, EXIT_REGROUP, EXIT_STOPPED
from torchmars.parallel.layout import Layout
from torchmars.training.checkpointer import Checkpointer, RunState

# How long a machine that leaves waits for others that are sent the same signal.
OTHERS_SECONDS = 2.0


@dataclass(frozen=True)
class StepFlags:
    """The events before a step that concern all ranks, whichever rank notices them."""

    stop: bool
    """A signal asked for the end."""
    gone: bool
    """The run's folder is."""
    regroup: bool
    """Machines join the run."""


@dataclass(frozen=True)
class Ending:
    """How a rank ends after a step."""

    code: int
    """The exit code that it leaves for its launcher."""
    save: bool = False
    """Whether a checkpoint has to be complete. Else a copy in memory has to, where there is one."""


STOP = Ending(EXIT_STOPPED, save=True)
JOIN = Ending(EXIT_REGROUP)


class Endings:
    """Whether and how the ranks end after a step before the last. Every rank makes the same calls.

    `first` is the first step since they have started.
    """

    def __init__(self, config: ResolvedConfig, checkpointer: Checkpointer, first: int) -> None:
        self.config, self.checkpointer, self.first = config, checkpointer, first
        self.joins_from = 0
        """The first step after which machines may join."""

    def after_step(self, step: int, flags: StepFlags) -> Ending | None:
        """Return how this rank ends after `step`, which was just made; None if it goes on."""
        if step == self.config.training.last_step:
            return None
        if flags.stop and step > self.first and process.fewest_ranks() is not None:
            return leaving(self.checkpointer.layout)
        if flags.stop:  # in the first step: it came while machines met, and none leaves alone
            return STOP
        return JOIN if flags.regroup and step >= self.joins_from else None

    def if_kept(
        self, ending: Ending, state: RunState, saved: bool, save: Callable[[], None]
    ) -> Ending | None:
        """Keep the run for the ranks that go on from here; return `ending`, None if that failed.

        In memory or else in a checkpoint, which may be `saved` already. If it fails, these ranks
        make another step; machines that join then wait as long as for a checkpoint.
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
        if ending is JOIN:
            self.joins_from = state.step + max(1, self.config.checkpoint.interval)
        return None


def leaving(layout: Layout) -> Ending:
    """Return how this rank ends, since machines of an elastic run have been sent a signal.

    One that the others can do without leaves, and they start again. Of several, or where ranks
    alone were sent the signal, the run stops.
    """
    time.sleep(OTHERS_SECONDS)
    notes = layout.gather(lambda: (process.machine_rank(), process.note(process.SIGNAL)))
    sent = layout.on_first(lambda: {machine: note for machine, note in notes if note})
    ways = [note.partition(" ")[2] for note in sent.values()]
    if ways not in (["copy"], ["save"]):
        return STOP
    code = EXIT_LEFT if process.machine_rank() in sent else EXIT_REGROUP
    return Ending(code, save=ways == ["save"])
