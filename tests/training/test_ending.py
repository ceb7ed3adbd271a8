"""How ranks end after a step, since machines leave or come: nothing of the run is lost."""

from types import SimpleNamespace

import pytest

from torchmars.core.errors import EXIT_REGROUP, EXIT_STOPPED
from torchmars.training.checkpointer import RunState
from torchmars.training.ending import REGROUP, SAVE, STOP, Endings, StepFlags


def endings_of(**checkpointer):
    """The endings of a run of 9 steps."""
    config = SimpleNamespace(
        training=SimpleNamespace(last_step=9), checkpoint=SimpleNamespace(interval=3)
    )
    return Endings(config, SimpleNamespace(**checkpointer))


def flags(*names):
    return StepFlags(**{name: name in names for name in ("stop", "gone", "regroup", "save")})


def test_the_run_stops_or_goes_on_with_other_machines():
    endings = endings_of()
    assert endings.after_step(2, flags()) is None
    assert endings.after_step(2, flags("regroup")) is REGROUP
    assert endings.after_step(2, flags("regroup", "save")) is SAVE
    assert endings.after_step(2, flags("regroup", "save", "stop")) is STOP
    assert endings.after_step(9, flags("stop")) is None
    assert (STOP.code, REGROUP.code, SAVE.code) == (EXIT_STOPPED, EXIT_REGROUP, EXIT_REGROUP)


@pytest.mark.parametrize(
    "ending,saved,kept,error,works,saves",
    [
        (REGROUP, False, True, None, True, 0),
        (REGROUP, False, False, None, True, 1),  # the run makes no copies
        (REGROUP, True, False, None, True, 0),  # the save of the step that was due
        (SAVE, True, True, None, True, 0),
        (REGROUP, False, False, "no room", False, 1),
        (SAVE, True, True, "no room", False, 0),
    ],
)
def test_the_run_is_handed_over_in_memory_or_else_in_a_checkpoint(
    ending, saved, kept, error, works, saves
):
    """If that fails, the ranks go on, and no step is lost."""
    done = []
    saver = SimpleNamespace(error=error, wait=lambda: None)
    endings = endings_of(keep=lambda state: done.append("keep"), is_kept=lambda: kept, saver=saver)
    found = endings.if_kept(ending, RunState(step=2), saved, lambda: done.append("save"))
    assert found is (ending if works else None)
    # Where it failed, until a checkpoint was due: 3 steps later.
    later = [endings.after_step(step, flags("regroup")) for step in (4, 5)]
    assert later == [REGROUP if works else None, REGROUP]
    assert done.count("save") == saves and done.count("keep") == (ending is REGROUP)
