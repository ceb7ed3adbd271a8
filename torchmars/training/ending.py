"""How ranks end after a step before the last: the run stops, or goes on with other machines."""

import time
from dataclasses import dataclass

from torchmars.cluster import process
from torchmars.core.errors import EXIT_LEFT, EXIT_REGROUP, EXIT_STOPPED
from torchmars.parallel.layout import Layout

# How long a machine that leaves waits for others that are sent the same signal.
OTHERS_SECONDS = 2.0


@dataclass(frozen=True)
class StepFlags:
    """The events before a step that concern all ranks, whichever rank notices them."""

    stop: bool
    """A signal asked for the end."""
    overdue: bool
    """A save is due by the clock."""
    changed: bool
    """The data have changed."""
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
    hurry: bool = False
    """Whether a machine has to end: what else is due after the step is left out."""


STOP = Ending(EXIT_STOPPED, save=True, hurry=True)
JOIN = Ending(EXIT_REGROUP)


def ending_after_step(flags: StepFlags, layout: Layout, first: bool) -> Ending | None:
    """Return how this rank ends after the step just made; None if it goes on. Collective.

    In the `first` step since the ranks have started, a signal has come while the machines met: then
    none leaves the run, which stops on all.
    """
    if flags.stop and not first and process.fewest_ranks() is not None:
        return leaving(layout)
    if flags.stop:
        return STOP
    return JOIN if flags.regroup else None


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
    return Ending(code, save=ways == ["save"], hurry=True)
