"""A machine that stood still and wakes up spoils nothing of what the others did without it."""

import signal
from pathlib import Path

import pytest

from tests.support.elastic import Machines, elastic_tables
from tests.support.machines import free_endpoint, machine, signal_all, tree_of, wait_for
from tests.support.same_end import check_same_end, tables_of
from tests.support.tiny import metrics, run_folder_of, write_text
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
    with free_endpoint() as endpoint:
        marker = tmp_path / "stands"
        machines = [machine(straight, f"s{number}", endpoint, number) for number in ("1", "0")]
        assert [each.wait() for each in machines] == [0, 0]
        # The process with the smaller number has the first rank, and the other one the rendezvous.
        late = machine(stopped, "late", endpoint, "1", f"{stand},{marker}")
        host = machine(stopped, "host", endpoint, "0")
        wait_for(marker.exists, late, host)
        tree = tree_of(late)
        signal_all(tree, signal.SIGSTOP)
        reached = max(metrics(stopped))
        other = machine(stopped, "other", endpoint, "1")
        wait_for(lambda: max(metrics(stopped), default=0) > reached + 2, host, other)
        Path(f"{marker}-go").touch()
        signal_all(tree, signal.SIGCONT)
        assert [each.wait() for each in (host, other)] == [0, 0]
        wait_for(lambda: late.poll() is not None)
    check_same_end(straight, stopped, ranks=2, lines=STEPS + 2)
    print(f"{stand}: the run ends bit for bit as the unbroken one; the late one with {late.poll()}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
@pytest.mark.parametrize("stand", STANDS)
def test_a_machine_that_the_others_went_on_without_spoils_nothing(tmp_path, stand):
    """It is stopped as a whole, wakes up, and joins them again."""
    marker = tmp_path / "stands"
    with Machines(elastic_tables(tmp_path, checkpoint={"interval": 3}), "1:2") as machines:
        late = machines.start(stand=f"{stand},{marker}")  # the smaller number has the first rank
        machines.start()
        wait_for(marker.exists, *machines.living.values())
        machines.send(late, signal.SIGSTOP)
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
