"""When all ranks start again after one has died, and what is said of it."""

import signal
from types import SimpleNamespace

import pytest
from torch.distributed import DistStoreError, HashStore
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from torchmars.cluster import agent as agents
from torchmars.cluster import membership
from torchmars.cluster.agent import Restarts
from torchmars.core.errors import EXIT_MISTAKE

MOST = 2


def killed(rank):
    return ProcessFailure(rank, 4711, -signal.SIGKILL, "no error file")


def cut_off(rank):
    """A rank that has lost its connection to one that died."""
    failure = ProcessFailure(rank, 4711, 1, "no error file")
    error = "RuntimeError: Connection closed by peer"
    failure.message = {"message": error, "extraInfo": {"py_callstack": error, "timestamp": "0"}}
    return failure


class Meeting(membership.Membership):
    """Other machines, which do one thing when ranks here have lost their connections."""

    def __init__(self, others=None, store=None):
        self.others, self.closed, self._store = others, False, store or HashStore()

    def _key(self, name):
        return name

    def others_act(self):
        return self.others

    def change(self):
        return "n2 fell silent"

    def set_closed(self):
        self.closed = True


def restarts(tmp_path, steps, recorded, machines=1):
    """What is told of restarts, before which the run had reported `steps`."""
    last = {0: ["step 7"], 1: ["step 7"]}
    logs = SimpleNamespace(
        last=last, ranks=2, machines=machines, code_of_ranks=lambda: None, leave_note=None
    )
    reached = iter(steps)
    return Restarts(logs, tmp_path, 0.0, recorded.append, lambda: next(reached))


def test_a_restart_is_told_and_recorded(tmp_path, capsys):
    recorded = []
    restarting = restarts(tmp_path, [7, 7, 8], recorded)
    assert [restarting.progressed() for _ in range(3)] == [True, False, True]
    restarting.tell(restarting.failures({1: killed(1)}), "", 3)
    restarting.tell([], "those of another machine do", 0)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: all ranks start again, since rank 1 on ")
    assert "SIGKILL" in first and first.endswith("do so 3 more times without progress")
    assert second == (
        "warning: all ranks start again, since those of another machine do; "
        "they may do so no more without progress"
    )
    assert [failure.rank for failure in recorded] == [1]


def starts_of(tmp_path, steps, ended=killed, meeting=None, started=None):
    """How often an agent starts ranks that always die, after having reported `steps` steps.

    As torch reports that one has `ended`, where this machine is `meeting` others. `started` gets an
    element each time.
    """
    started = [] if started is None else started

    class Dying(LocalElasticAgent):
        def __init__(self, most):
            spec = SimpleNamespace(
                max_restarts=most, monitor_interval=0, rdzv_handler=meeting, role=""
            )
            spec.get_entrypoint_name = str
            self._worker_group = SimpleNamespace(spec=spec, state=WorkerState.HEALTHY)
            self._remaining_restarts = most

        def _initialize_workers(self, group):
            started.append(group)
            if meeting:
                meeting.round = f"meeting:{len(started)}"

        def _stop_workers(self, group): ...

        def _shutdown(self, death_sig): ...

        def _monitor_workers(self, group):
            return RunResult(WorkerState.FAILED, failures={0: ended(0)})

    # What is tested is the class between torch's agent and these stubs.
    restarting = restarts(tmp_path, steps, [], machines=2 if meeting else 1)
    dying = type("Agent", (agents.Agent, Dying), {})(MOST, restarting=restarting)
    assert dying._invoke_run().is_failed()
    return len(started)


def test_only_restarts_without_progress_are_counted(tmp_path):
    assert starts_of(tmp_path, [0] * 9) == 1 + MOST
    assert starts_of(tmp_path, [5, 5, 5]) == 1 + MOST
    assert starts_of(tmp_path, [5, 6, 7, 7, 8, 8, 8]) == 7


def test_restarts_are_those_of_the_run_on_all_machines(tmp_path):
    """A round in which ranks of both fail counts once."""
    store = HashStore()
    mine, other = Meeting(store=store), Meeting(store=store)
    for number, left in ((1, 2), (2, 1), (3, 0), (4, 0)):
        mine.round = other.round = f"meeting:{number}"
        assert mine.restarts_left(2, step=7) == other.restarts_left(2, step=7) == left
    mine.round = "meeting:5"
    assert mine.restarts_left(2, step=8) == 2  # there was progress
    store.add("launches", 1)
    mine.round = "meeting:6"
    assert mine.restarts_left(2, step=7) == 2  # the run has begun anew at the same store


def test_restarts_of_other_machines_are_counted_here(tmp_path):
    meeting = Meeting()
    for number in range(MOST):
        meeting.round = f"meeting:-{number}"
        meeting.restarts_left(MOST, step=5)
    assert starts_of(tmp_path, [5] * 9, meeting=meeting) == 1 and meeting.closed


def test_failures_that_follow_from_those_of_others_are_not_counted(tmp_path):
    """As long as there is progress, or a few times without."""
    few, started, meeting = [5, 6, 7] + [7] * 99, [], Meeting("meet")
    with pytest.raises(RendezvousClosedError, match="n2 fell silent, again and again"):
        starts_of(tmp_path, few, cut_off, meeting, started)
    assert meeting.closed and len(started) >= 3 + agents.FALLOUTS
    assert starts_of(tmp_path, few, cut_off, Meeting("close")) == 1


def test_failures_that_only_seem_to_follow_from_others_are_counted(tmp_path):
    """As of a rank that aborts by itself, while no other machine does anything."""
    meeting = Meeting()
    assert starts_of(tmp_path, [0] * 9, cut_off, meeting) == 1 + MOST and meeting.closed


def test_a_mistake_that_one_rank_finds_is_not_tried_again(tmp_path):
    def mistaken(rank):
        return ProcessFailure(rank, 4711, EXIT_MISTAKE, "no error file")

    meeting = Meeting()
    assert starts_of(tmp_path, [1, 2, 3], mistaken) == 1
    assert starts_of(tmp_path, [1, 2, 3], mistaken, meeting) == 1 and meeting.closed


def test_the_others_are_told_at_once_that_a_machine_gives_up(tmp_path):
    meeting = Meeting("meet")
    assert starts_of(tmp_path, [0] * 9, killed, meeting) == 1 + MOST and meeting.closed


def test_a_machine_that_is_lost_as_the_others_meet_costs_another_round(tmp_path, monkeypatch):
    meeting, met = Meeting(), []
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=meeting))
    agent = object.__new__(agents.Agent)
    agent.restarting = restarts(tmp_path, [], [])

    def meet(self, group):
        met.append(group)
        if len(met) == 1:  # it does not say how many ranks it has
            raise DistStoreError("wait timeout after 45000ms")

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    meeting.num_nodes_waiting = lambda: 0  # all are there
    with pytest.raises(DistStoreError):
        agent._rendezvous(group)
    met.clear()
    meeting.num_nodes_waiting = lambda: 1
    meeting.round = "name:7"
    agent._rendezvous(group)
    assert len(met) == 2 and agent.restarting.logs.round == "name:7"
