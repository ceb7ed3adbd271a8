"""One machine leaves an elastic run by a signal: how, and when it may not."""

import pickle
import signal
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from torchmars.cluster import membership, process
from torchmars.cluster.agent import Agent, Left
from torchmars.core.errors import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_REGROUP, EXIT_STOPPED
from torchmars.training import ending
from torchmars.training.checkpointer import RunState
from torchmars.training.ending import JOIN, STOP, Ending, Endings, StepFlags


def meet(usable="1/2/3", here=2, waiting=0, is_host="0", place="participants"):
    """A machine's view of a run of `here` machines of which it is one, unless it has another place.

    So many others are `waiting`.
    """
    backend = C10dRendezvousBackend(HashStore(), "run")
    options = {"local_addr": "n0", "usable": usable, "is_host": is_host, "per_machine": "1"}
    mine = membership.meet(
        HashStore(), backend, RendezvousParameters("c10d", "n0:1", "run", 1, 4, **options)
    )
    mine._state_holder._cache_duration = 0
    others = [dynamic._NodeDesc(f"n{number}", 7, 0) for number in range(1, here + waiting + 1)]
    in_run, state = others[: here - (place == "participants")], dynamic._RendezvousState()
    state.complete = True
    state.participants = {node: number for number, node in enumerate(in_run)}
    state.wait_list = set(others[len(in_run) :][:waiting])
    if place == "participants":
        state.participants[mine._this_node] = here
    else:
        getattr(state, place).add(mine._this_node)
        mine._op_executor.spare = True
    nodes = [mine._this_node, *state.participants, *state.wait_list]
    state.last_heartbeats = dict.fromkeys(nodes, datetime.now(UTC))
    backend.set_state(pickle.dumps(state))
    mine.num_nodes_waiting()
    mine.members = mine._here()
    return mine, lambda: pickle.loads(backend.get_state()[0])


@pytest.mark.parametrize(
    "way,case",
    [
        ("copy", {"here": 3}),
        ("copy", {"here": 2}),
        ("stop", {"here": 1}),
        ("save", {"here": 1, "waiting": 1}),  # that one has no part of a copy
        ("save", {"usable": "1/3", "here": 3}),  # one of the two that stay will have no place
        ("save", {"usable": "2/3", "here": 2, "waiting": 1}),
        ("stop", {"usable": "2/3", "here": 2}),
        ("copy", {"usable": "2/3", "here": 3}),
        ("stop", {"here": 3, "is_host": "1"}),  # the others meet at it
    ],
)
def test_how_the_others_go_on_without_a_machine(way, case):
    mine, _ = meet(**case)
    assert mine.way_to_leave() == way


@pytest.mark.parametrize("place", ["participants", "wait_list", "redundancy_list"])
def test_a_machine_that_leaves_is_in_no_list(place):
    mine, state = meet(place=place)
    mine._state_holder.state.participants.clear()  # a change that a signal has cut off
    mine._state_holder.mark_dirty()
    mine.leave()
    left = state()
    assert mine._this_node not in {*left.participants, *left.wait_list, *left.redundancy_list}
    assert len(left.participants) == 2 - (place == "participants") and not left.closed


def test_a_store_that_does_not_answer_keeps_nobody_from_leaving(monkeypatch):
    mine, _ = meet()

    def fail():
        raise RendezvousConnectionError("lost")

    monkeypatch.setattr(mine._state_holder._backend, "get_state", fail)
    mine.leave()


@pytest.fixture
def agent(tmp_path):
    """An agent whose ranks ended with a code, as `ended` says."""

    def agent(meeting, code=None):
        made = object.__new__(Agent)
        notes = {}
        logs = SimpleNamespace(
            code_of_ranks=lambda: code,
            exit_code=lambda: None if code in (EXIT_LEFT, EXIT_REGROUP) else code,
            leave_note=notes.__setitem__,
        )
        made.restarting = SimpleNamespace(logs=logs, failures=lambda ended: list(ended))
        made._worker_group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=meeting))
        made.signalled, made._pcontext, made.notes = None, None, notes
        meeting.no_place = made._end_without_place
        return made

    return agent


def test_the_first_signal_waits_for_the_ranks_and_another_does_not(agent, monkeypatch):
    made = agent(meet(here=3)[0])
    made._take_signal(signal.SIGUSR1, None)
    assert made.notes == {process.SIGNAL: "SIGUSR1 copy"}
    made._take_signal(signal.SIGTERM, None)  # an echo
    made.signalled = (signal.SIGUSR1, made.signalled[1] - 2)
    with pytest.raises(SignalException) as ended:
        made._take_signal(signal.SIGTERM, None)
    assert ended.value.sigval == signal.SIGTERM


@pytest.mark.parametrize("is_host,ends", [("0", True), ("1", False)])
def test_a_machine_without_a_place_ends_unless_the_others_meet_at_it(agent, is_host, ends):
    meeting, _ = meet(place="redundancy_list", is_host=is_host)
    made = agent(meeting)
    for _ in range(2):  # as the signal comes, and as it is found to be without a place
        if ends:
            with pytest.raises(SignalException):
                made._take_signal(signal.SIGTERM, None)
        else:
            made._take_signal(signal.SIGTERM, None)
            meeting.no_place()


@pytest.mark.parametrize(
    "code,exits",
    [
        (EXIT_LEFT, []),
        (None, [-signal.SIGTERM]),  # before the ranks catch signals
        (None, [-signal.SIGUSR1, -signal.SIGKILL]),  # torch ends the others
        (None, [EXIT_INTERRUPTED]),
    ],
)
def test_ranks_that_end_by_the_signal_are_no_failure(agent, monkeypatch, code, exits):
    """They would close the run for all machines, with MAX_RESTARTS = 0."""
    meeting, _ = meet(here=3)
    made = agent(meeting, code)
    failures = {n: ProcessFailure(n, 7, exit, "no file") for n, exit in enumerate(exits)}
    state = WorkerState.FAILED if exits else WorkerState.SUCCEEDED
    result = RunResult(state, failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: result)
    monkeypatch.setattr(
        LocalElasticAgent, "run", lambda self, role: self._monitor_workers(self._worker_group)
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    made._take_signal(signal.SIGTERM, None)
    with pytest.raises(SignalException) as ended:
        made.run()
    assert isinstance(ended.value, Left) == (code == EXIT_LEFT)
    assert not meeting.is_closed()


def test_ranks_that_have_not_all_ended_are_waited_for(agent, monkeypatch):
    made, result = agent(meet(here=3)[0], EXIT_LEFT), RunResult(WorkerState.HEALTHY)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: result)
    made._take_signal(signal.SIGTERM, None)
    assert made._monitor_workers(made._worker_group) is result


class Ranks:
    """A layout of ranks of two machines, of which the first calls."""

    def __init__(self, *notes):
        self.notes = list(enumerate(notes))

    def gather(self, work):
        return self.notes

    def on_first(self, work):
        return work()


def endings_of(layout, **checkpointer):
    """The endings of a run of 9 steps whose ranks have started after step 0."""
    config = SimpleNamespace(
        training=SimpleNamespace(last_step=9), checkpoint=SimpleNamespace(interval=3)
    )
    return Endings(config, SimpleNamespace(layout=layout, **checkpointer), first=1)


@pytest.mark.parametrize(
    "notes,codes,save",
    [
        (["SIGTERM copy", None], [EXIT_LEFT, EXIT_REGROUP], False),
        ([None, "SIGTERM save"], [EXIT_REGROUP, EXIT_LEFT], True),
        (["SIGTERM stop", None], [EXIT_STOPPED] * 2, True),
        (["SIGTERM copy", "SIGTERM copy"], [EXIT_STOPPED] * 2, True),
        (["SIGTERM copy", "SIGINT stop"], [EXIT_STOPPED] * 2, True),
        ([None, None], [EXIT_STOPPED] * 2, True),  # a rank alone was sent it
        (["", None], [EXIT_STOPPED] * 2, True),  # the disk is full
    ],
)
def test_one_machine_leaves_or_the_run_stops(monkeypatch, notes, codes, save):
    monkeypatch.setattr(ending, "OTHERS_SECONDS", 0.0)
    monkeypatch.setenv(process.FEWEST, "1")
    flags = StepFlags(stop=True, gone=False, regroup=True)
    found = []
    for machine in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", machine)
        endings = endings_of(Ranks(*notes))
        found.append(endings.after_step(2, flags))
        assert endings.after_step(1, flags) is STOP
    assert [each.code for each in found] == codes
    assert {each.save for each in found} == {save}
    monkeypatch.delenv(process.FEWEST)
    assert endings.after_step(2, flags) is STOP and endings.after_step(9, flags) is None


@pytest.mark.parametrize(
    "save,saved,kept,error,works,saves",
    [
        (False, False, True, None, True, 0),
        (False, False, False, None, True, 1),  # the run makes no copies
        (False, True, False, None, True, 0),  # the save of the step that was due
        (True, True, True, None, True, 0),
        (False, False, False, "no room", False, 1),
        (True, True, True, "no room", False, 0),
    ],
)
def test_the_run_is_handed_over_in_memory_or_else_in_a_checkpoint(
    save, saved, kept, error, works, saves
):
    """If that fails, the ranks go on, and no step is lost."""
    done = []
    saver = SimpleNamespace(error=error, wait=lambda: None)
    endings = endings_of(
        None, keep=lambda state: done.append("keep"), is_kept=lambda: kept, saver=saver
    )
    leave = JOIN if not save else Ending(EXIT_REGROUP, save=True)
    found = endings.if_kept(leave, RunState(step=2), saved, lambda: done.append("save"))
    assert found is (leave if works else None)
    joins = StepFlags(stop=False, gone=False, regroup=True)
    waits = not works and leave is JOIN  # until a checkpoint was due: 3 steps later
    assert [endings.after_step(step, joins) for step in (4, 5)] == [None if waits else JOIN, JOIN]
    assert done.count("save") == saves and done.count("keep") == (not save)


@pytest.mark.parametrize("patient", [True, False])
def test_ranks_that_take_long_to_end_are_waited_for_after_a_step_but_not_without_end(patient):
    mine, _ = meet()
    state = mine._state_holder.state  # of a round in which the others still are
    del state.participants[mine._this_node]
    context = SimpleNamespace(node=mine._this_node, state=state)
    rounds, now = mine._op_executor, time.monotonic()
    rounds.last, rounds.deadline = state.round, now - 5
    rounds.patient_until = now + 60 if patient else 0.0
    deadline = rounds._join(lambda context, deadline: deadline, context, now - 5)
    assert deadline > now if patient else deadline == now - 5
