"""When all ranks start again after one has died, and what is said of it."""

import signal
from types import SimpleNamespace

from torch.distributed.elastic.agent.server import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster import agent as agents
from torchmars.cluster.agent import Restarts

MOST = 2


def killed(rank):
    return ProcessFailure(rank, 4711, -signal.SIGKILL, "no error file")


def restarts(tmp_path, steps, recorded):
    """What is told of restarts, before which the run had reported `steps`."""
    logs = SimpleNamespace(last={0: ["step 7"], 1: ["step 7"]}, ranks=2)
    reached = iter(steps)
    return Restarts(logs, tmp_path, 0.0, recorded.append, lambda: next(reached))


def test_a_restart_is_told_and_recorded(tmp_path, capsys):
    recorded = []
    restarting = restarts(tmp_path, [7, 7, 8], recorded)
    assert [restarting.progressed() for _ in range(3)] == [True, False, True]
    restarting.tell({1: killed(1)}, 3)
    restarting.tell({}, 0)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: all ranks start again, since rank 1 on ")
    assert "SIGKILL" in first and first.endswith("do so 3 more times without progress")
    assert second == (
        "warning: all ranks start again, since those of another machine do; "
        "they may do so no more without progress"
    )
    assert [failure.rank for failure in recorded] == [1]


def starts_of(tmp_path, steps):
    """How often an agent starts ranks that always die, after having reported `steps` steps."""
    started = []

    class Dying(LocalElasticAgent):
        def __init__(self, most):
            spec = SimpleNamespace(
                max_restarts=most, monitor_interval=0, rdzv_handler=None, role=""
            )
            spec.get_entrypoint_name = str
            self._worker_group = SimpleNamespace(spec=spec, state=WorkerState.HEALTHY)
            self._remaining_restarts = most

        def _initialize_workers(self, group):
            started.append(group)

        def _stop_workers(self, group): ...

        def _monitor_workers(self, group):
            return RunResult(WorkerState.FAILED, failures={0: killed(0)})

    # What is tested is the class between torch's agent and these stubs.
    dying = type("Agent", (agents.Agent, Dying), {})(MOST, restarting=restarts(tmp_path, steps, []))
    assert dying._invoke_run().is_failed()
    return len(started)


def test_only_restarts_without_progress_are_counted(tmp_path):
    assert starts_of(tmp_path, [0] * 9) == 1 + MOST
    assert starts_of(tmp_path, [5, 5, 5]) == 1 + MOST
    assert starts_of(tmp_path, [5, 6, 7, 7, 8, 8, 8]) == 7
