"""Which rank failed first, of what torchrun reports on one or several machines."""

import json
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars import failures
from torchmars.failures import failure_of, first_failure, lost_machines
from torchmars.logs import RankLogs


def ended(folder, rank, code, error=None, at=0):
    """What torchrun has of a rank: its exit code and, where it raised an exception, what @record wrote."""
    file = folder / f"{rank}.json"
    if error:
        file.write_text(json.dumps({"message": {"message": error, "extraInfo": {"py_callstack": f"Traceback of {rank}\n{error}\n", "timestamp": str(at)}}}))
    return rank, ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(file))


def first(folder, *ranks):
    logs = RankLogs(folder / "logs", folder / "scratch", {0})
    logs.launch, logs.machines = "n1-1234", 2
    logs.last = {rank: [f"the last line of {rank}"] for rank, _ in ranks}
    return first_failure([failure_of(rank, failure, logs.last[rank]) for rank, failure in ranks], logs)


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def test_the_cause_comes_before_what_it_does_to_others(tmp_path):
    failure = first(tmp_path, ended(tmp_path, 0, 1, CLOSED, at=10), ended(tmp_path, 1, 1, "ValueError: boom", at=11), ended(tmp_path, 2, -15))
    assert (failure.rank, failure.code, failure.message) == (1, 1, "Traceback of 1\nValueError: boom")
    aborted = first(tmp_path, ended(tmp_path, 5, -6), ended(tmp_path, 6, 1, "RuntimeError: rank 7: OSError()", at=9), ended(tmp_path, 7, 1, "OSError: full", at=11))
    assert aborted.rank == 7
    killed = first(tmp_path, ended(tmp_path, 3, 1, CLOSED, at=10), ended(tmp_path, 4, -9))
    assert killed.rank == 4 and killed.message.startswith("the last line of 4\nSignal 9 (SIGKILL)")


def test_of_several_causes_the_first_counts(tmp_path):
    failure = first(tmp_path, ended(tmp_path, 0, 1, "ValueError: late", at=12), ended(tmp_path, 1, 1, "ValueError: early", at=11))
    assert failure.message.endswith("ValueError: early")


def test_machines_tell_each_other(tmp_path):
    """The one whose ranks have only lost connections waits for the other's word."""
    other = threading.Timer(0.5, first, [tmp_path, ended(tmp_path, 2, 1, "ValueError: boom", at=20)])
    other.start()
    failure = first(tmp_path, ended(tmp_path, 0, 1, CLOSED, at=10))
    other.join()
    assert failure.rank == 2 and failure.message.endswith("boom")


@pytest.mark.parametrize("writable", [True, False])
def test_a_machine_that_hears_nothing_does_not_wait_for_ever(tmp_path, monkeypatch, writable):
    monkeypatch.setattr(failures, "WAIT_SECONDS", 0.5)
    if not writable:
        (tmp_path / "logs").write_text("a file where the folder should be")
    began = time.monotonic()
    assert first(tmp_path, ended(tmp_path, 0, 1, CLOSED, at=10)).consequence
    assert time.monotonic() - began < 5


def test_a_machine_that_has_lost_the_others_says_what_they_say(tmp_path):
    first(tmp_path, ended(tmp_path, 2, 1, "ValueError: boom", at=20))
    logs = RankLogs(tmp_path / "logs", tmp_path / "scratch", {0})
    logs.launch, logs.machines = "n1-1234", 2
    assert first_failure([lost_machines("Connection closed by peer")], logs).rank == 2
