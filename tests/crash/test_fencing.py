"""A machine that stood still and wakes up spoils nothing of what the others did without it."""

import signal
from pathlib import Path

import pytest

from tests.support.elastic import Machines, elastic_tables
from tests.support.machines import wait_for
from tests.support.same_end import check_same_end, tables_of
from tests.support.tiny import run_folder_of, write_text
from torchmars.checkpoint.upkeep import verify_checkpoints

STEPS = 60
STANDS = ["_stage,5", "_publish,5", "tidy,5", "clear,5", "write,25"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
@pytest.mark.parametrize("stand", STANDS)
def test_a_machine_that_wakes_up_late_spoils_nothing(tmp_path, stand):
    """It is stopped as a whole, the others go on with another one, and then it may go on."""
    write_text(tmp_path)
    changes = {"guards": {"hang_seconds": 20}, "training": {"steps": STEPS}}
    straight, stopped = (tables_of(tmp_path, name, STEPS, changes) for name in ("one", "other"))
    with Machines(straight, "2") as machines:
        machines.start(2)
        assert [each.wait() for each in machines.living.values()] == [0, 0]
    marker = tmp_path / "stands"
    with Machines(stopped, "2") as machines:
        machines.start(2, stand=f"{stand},{marker}")
        wait_for(marker.exists, *machines.living.values())
        machines.send(late := machines.first(), signal.SIGSTOP)
        reached = machines.reached
        machines.start()
        others = [each for name, each in machines.living.items() if name != late]
        wait_for(lambda: machines.reached > reached + 2, *others)
        Path(f"{marker}-go").touch()
        machines.send(late, signal.SIGCONT)
        assert [each.wait() for each in others] == [0, 0]
        code = machines.living[late].wait()
    check_same_end(straight, stopped, ranks=2, lines=STEPS + 2)
    print(f"{stand}: the run ends bit for bit as the unbroken one; the late one with {code}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
@pytest.mark.parametrize("stand", STANDS)
def test_a_machine_that_the_others_went_on_without_spoils_nothing(tmp_path, stand):
    """It is stopped as a whole, wakes up, and joins them again."""
    marker = tmp_path / "stands"
    with Machines(elastic_tables(tmp_path, checkpoint={"interval": 3}), "1:2") as machines:
        machines.start(2, stand=f"{stand},{marker}")
        wait_for(marker.exists, *machines.living.values())
        machines.send(late := machines.first(), signal.SIGSTOP)
        wait_for(lambda: len(machines.starts) > 1)
        [step, count, _] = machines.starts[1]
        wait_for(lambda: machines.reached > step + 9)
        assert count == 1
        Path(f"{marker}-go").touch()
        machines.send(late, signal.SIGCONT)
        machines.wait_for_start(3)
        assert machines.starts[2][1] == 2 and machines.end() == [75, 75]
        machines.check_metrics()
        left, joined = machines.events("left", "joined")
        assert left["machine"] == joined["machine"] == late
        assert left["steps_again"] <= 2 and joined["steps_again"] == 0
        verify_checkpoints(run_folder_of(machines.tables) / "checkpoints")
