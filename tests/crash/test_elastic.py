"""Runs of NNODES=MIN:MAX that lose machines and get others, and go on from copies in memory."""

import signal
import time

import pytest

from tests.support.elastic import IN_MEMORY, Machines, elastic_tables
from tests.support.full import full_but
from tests.support.machines import wait_for
from tests.support.tiny import metrics, run_folder_of
from torchmars.checkpoint.memory import shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.PLACE.is_dir(), reason="needs /dev/shm")


def test_a_run_loses_its_first_machine_and_gets_another(tmp_path):
    with Machines(elastic_tables(tmp_path), "1:2") as machines:
        machines.start(2)
        machines.wait_for_start(1)
        reached = machines.lose(name := machines.first())
        machines.wait_for_start(2)
        machines.start()
        machines.wait_for_start(3)
        assert machines.end() == [75, 75]
        (_, first, _), (alone, one, origin), (joined, both, after) = machines.starts
        left, came = machines.events("left", "joined")
        assert (left["event"], left["machine"]) == ("left", name)
        assert (came["event"], came["machine"]) == ("joined", "m2")
        assert left["steps_again"] <= 2 and came["steps_again"] == 0  # a join costs no step
        assert (first, one, both) == (2, 1, 2)
        assert reached - 2 <= alone <= reached + 1 and origin == IN_MEMORY.format(alone)
        assert joined > alone and after == IN_MEMORY.format(joined)
        machines.check_metrics()


@pytest.mark.full
def test_a_spare_takes_the_place_of_a_lost_machine_and_the_last_waits_for_another(tmp_path):
    tables = elastic_tables(tmp_path, training={"global_batch_size": 8})
    with Machines(tables, "2:3", join_seconds=90) as machines:
        machines.start(3)
        machines.wait_for_start(1)
        machines.lose(machines.first())
        machines.wait_for_start(2)
        reached = machines.lose(machines.first())
        (last,) = machines.living
        wait_for(lambda: "fell silent" in machines.said(last), *machines.living.values())
        machines.start(2)  # one of them has no place, and may come after the other has started
        machines.wait_for_start(3)
        [spare] = {"m3", "m4"} - set(machines.events("started")[-1]["names"])
        wait_for(lambda: "waits     until it joins after a step" in machines.said(spare))
        assert reached - 2 <= machines.starts[2][0] <= reached + 1
        assert [machines for _, machines, _ in machines.starts] == [2, 2, 2]
        assert machines.end(*machines.events("started")[-1]["names"]) == [75, 75, 75]
        machines.check_metrics()
        assert "had no place in the run" in machines.said(spare)


@pytest.mark.full
def test_without_copies_a_join_saves_a_checkpoint_and_costs_no_step_either(tmp_path):
    tables = elastic_tables(tmp_path, checkpoint={"memory_interval": 0})
    with Machines(tables, "1:2") as machines:
        machines.start(2)
        machines.wait_for_start(1)
        machines.lose(machines.first())
        machines.wait_for_start(2)  # from the beginning
        machines.start()
        machines.wait_for_start(3)
        step, count, origin = machines.starts[2]
        assert count == 2 and origin.endswith(f"checkpoints/step-{step:08d}")
        came = machines.events("left", "joined")[-1]
        assert (came["event"], came["machine"], came["steps_again"]) == ("joined", "m2", 0)
        assert machines.end() == [75, 75]
        machines.check_metrics()


@pytest.mark.full
def test_a_machine_that_stood_still_comes_back(tmp_path):
    with Machines(elastic_tables(tmp_path), "1:2") as machines:
        machines.start(2)
        machines.wait_for_start(1)
        name = machines.first()
        machines.send(name, signal.SIGSTOP)
        machines.wait_for_start(2)
        machines.send(name, signal.SIGCONT)
        machines.wait_for_start(3)
        assert [count for _, count, _ in machines.starts] == [2, 1, 2]
        assert "the other machines go on without this one" in machines.said(name)
        assert machines.end() == [75, 75]
        machines.check_metrics()


@pytest.mark.full
def test_a_machine_that_waits_takes_the_place_of_one_that_leaves_and_leaves_itself(tmp_path):
    tables = elastic_tables(tmp_path, training={"global_batch_size": 9})
    with Machines(tables, "1:2") as machines:
        machines.start(2)
        machines.wait_for_start(1)
        [spare] = machines.living.keys() - {machines.first()}
        wait_for(lambda: "waits     until it joins after a step" in machines.said(spare))
        reached = machines.reached
        wait_for(lambda: machines.reached > reached + 150)  # the other one has seen it by then
        # It takes the place of the only other one, whose memory is gone, from a checkpoint.
        assert machines.leave(machines.first()) == 75
        machines.wait_for_start(2)
        step, count, origin = machines.starts[1]
        assert count == 1 and origin.startswith(f"from step {step}: /")
        other = machines.start()
        wait_for(lambda: "waits     until it joins after a step" in machines.said(other))
        assert machines.leave(other, signal.SIGUSR1) == 75
        assert f"by SIGUSR1: {other} has left the run" in machines.said(other)
        assert machines.end() == [75] and len(machines.starts) == 2
        machines.check_metrics()


@pytest.mark.full
@pytest.mark.parametrize("number, ranks", [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_machine_leaves_by_a_signal_and_the_others_go_on(tmp_path, number, ranks):
    tables = elastic_tables(tmp_path, training={"global_batch_size": 12})
    with Machines(tables, "1:3") as machines:
        machines.start(3)
        machines.wait_for_start(1)
        name = machines.first()
        assert machines.leave(name, number, ranks) == 75
        assert f"by {number.name}: {name} has left the run" in machines.said(name)
        machines.wait_for_start(2)
        step, count, origin = machines.starts[1]
        assert count == 2 and origin == IN_MEMORY.format(step)
        [left] = machines.events("left", "joined")
        assert (left["machine"], left["steps_again"]) == (name, 0)
        assert all(
            f"machines  {name} leaves: all ranks" in machines.said(m) for m in machines.living
        )
        assert machines.end() == [75, 75]
        machines.check_metrics()


@pytest.mark.parametrize("pause", full_but([], [0.0, 1.0, 2.0, 4.0], [0.0, 2.0]))
def test_signals_to_all_machines_save_and_end_the_run(tmp_path, pause):
    tables = elastic_tables(tmp_path, training={"global_batch_size": 12})
    with Machines(tables, "1:3") as machines:
        machines.start(3)
        machines.wait_for_start(1)
        for launcher in machines.living.values():
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGUSR1)
            time.sleep(pause)
        assert [each.wait() for each in machines.living.values()] == [75, 75, 75]
        print(*map(machines.said, machines.living), sep="\n")
        machines.living.clear()
        machines.check_metrics()
        folder = run_folder_of(machines.tables)
        [saved] = (folder / "checkpoints").glob("step-*")
        assert int(saved.name.removeprefix("step-")) == max(metrics(machines.tables))


@pytest.mark.full
def test_a_second_signal_ends_a_machine_at_once_and_the_others_go_on(tmp_path):
    with Machines(elastic_tables(tmp_path), "1:2") as machines:
        machines.start(2)
        machines.wait_for_start(1)
        name = machines.first()
        [other] = machines.living.keys() - {name}
        machines.send(other, signal.SIGSTOP)  # so that no step ends
        machines.living[name].send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert machines.leave(name) == 128 + signal.SIGTERM
        machines.send(other, signal.SIGCONT)
        machines.wait_for_start(2)
        assert machines.end() == [75]
        machines.check_metrics()
