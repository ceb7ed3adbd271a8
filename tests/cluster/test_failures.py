"""Which rank failed first, of what torchrun reports on one or several machines."""

import json
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import failures
from torchmars.cluster.failures import Kind, failure_of, first_failure, hang_of, lost_machines
from torchmars.cluster.logs import RankLogs


def ended(folder, rank, code, error=None, at=0):
    """Return what torchrun has of a rank: its exit code, and what @record wrote of an `error`."""
    file = folder / f"{rank}.json"
    if error:
        file.write_text(
            json.dumps(
                {
                    "message": {
                        "message": error,
                        "extraInfo": {
                            "py_callstack": f"Traceback of {rank}\n{error}\n",
                            "timestamp": str(at),
                        },
                    }
                }
            )
        )
    return rank, ProcessFailure(
        local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(file)
    )


def first(folder, *ranks, clock=time):
    logs = RankLogs(folder / "logs", folder / "scratch", {0})
    logs.launch, logs.machines = "n1-1234", 2
    logs.last = {rank: [f"the last line of {rank}"] for rank, _ in ranks}
    return first_failure(
        [failure_of(rank, failure, logs.last[rank]) for rank, failure in ranks], logs, clock
    )


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def test_the_cause_comes_before_what_it_does_to_others(tmp_path):
    failure = first(
        tmp_path,
        ended(tmp_path, 0, 1, CLOSED, at=10),
        ended(tmp_path, 1, 1, "ValueError: boom", at=11),
        ended(tmp_path, 2, -15),
    )
    assert (failure.rank, failure.code, failure.message) == (
        1,
        1,
        "Traceback of 1\nValueError: boom",
    )
    aborted = first(
        tmp_path,
        ended(tmp_path, 5, -6),
        ended(tmp_path, 6, 1, "RuntimeError: rank 7: OSError()", at=9),
        ended(tmp_path, 7, 1, "OSError: full", at=11),
    )
    assert aborted.rank == 7
    killed = first(tmp_path, ended(tmp_path, 3, 1, CLOSED, at=10), ended(tmp_path, 4, -9))
    assert killed.rank == 4 and killed.message.startswith("the last line of 4\nSignal 9 (SIGKILL)")


def test_of_several_causes_the_first_counts(tmp_path):
    failure = first(
        tmp_path,
        ended(tmp_path, 0, 1, "ValueError: late", at=12),
        ended(tmp_path, 1, 1, "ValueError: early", at=11),
    )
    assert failure.message.endswith("ValueError: early")


def test_machines_tell_each_other(tmp_path):
    """The one whose ranks have only lost connections waits for the other's word."""
    other = threading.Timer(
        0.5, first, [tmp_path, ended(tmp_path, 2, 1, "ValueError: boom", at=20)]
    )
    other.start()
    failure = first(tmp_path, ended(tmp_path, 0, 1, CLOSED, at=10))
    other.join()
    assert failure.rank == 2 and failure.message.endswith("boom")


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("writable", [True, False])
def test_a_machine_that_hears_nothing_does_not_wait_for_ever(tmp_path, writable):
    clock = Clock()
    if not writable:
        (tmp_path / "logs").write_text("a file where the folder should be")
    assert first(tmp_path, ended(tmp_path, 0, 1, CLOSED, at=10), clock=clock).kind != Kind.CAUSE
    assert clock.now == pytest.approx(failures.WAIT_SECONDS if writable else 0, abs=0.5)


NO_TRAFFIC = (
    "NoTraffic: n1: the ranks are connected, but cannot exchange data (...): set GLOO_SOCKET..."
)


def test_silence_of_the_network_is_the_verdict_unless_a_rank_has_died(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    lost, silent = ended(tmp_path, 0, 1, CLOSED, at=10), ended(tmp_path, 1, 2, NO_TRAFFIC, at=11)
    verdict = first(tmp_path, lost, silent, clock=clock)
    assert (verdict.code, verdict.message) == (2, NO_TRAFFIC.replace("NoTraffic", "error"))
    began = clock.now
    assert began > failures.WAIT_SECONDS
    monkeypatch.setenv("SLURMD_NODENAME", "n2")  # all machines say the same: none waits for a cause
    assert first(tmp_path, ended(tmp_path, 2, 2, NO_TRAFFIC, at=9), clock=clock).code == 2
    assert clock.now < began + 1
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert first(tmp_path, ended(tmp_path, 4, -9), clock=clock).code == -9
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert first(tmp_path, ended(tmp_path, 0, 2, NO_TRAFFIC, at=11), clock=clock).rank == 4


def test_a_hang_comes_before_the_kill_of_the_rank_that_did_not_end(tmp_path):
    """Torchrun kills a stopped rank 30 s after it has asked it to end."""
    logs = RankLogs(tmp_path / "logs", tmp_path / "scratch", {0})
    _, hung = ended(tmp_path, 1, 70)
    _, killed = ended(tmp_path, 0, -9)
    hung.timestamp, killed.timestamp = 100, 130
    report = "error: no step for ...\n  rank 0: ..."
    ours = [failure_of(0, killed, ["its last line"]), hang_of(1, hung, report)]
    failure = first_failure(ours, logs, Clock())
    assert (failure.code, failure.rank, failure.message) == (70, 1, report)


def test_a_machine_that_has_lost_the_others_says_what_they_say(tmp_path):
    first(tmp_path, ended(tmp_path, 2, 1, "ValueError: boom", at=20))
    logs = RankLogs(tmp_path / "logs", tmp_path / "scratch", {0})
    logs.launch, logs.machines = "n1-1234", 2
    assert first_failure([lost_machines("Connection closed by peer")], logs).rank == 2
