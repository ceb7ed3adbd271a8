"""torchrun for the ranks of this machine, with the run's own exit code, logs and first failure.

torchrun makes 1 of every exit code, and starts ranks again after any but 0. So a rank that knows
how the run ends leaves its code in a file (`EXIT_CODE_FILE`) and ends with 0.
"""

import argparse
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args

from torchmars.cluster import process, rendezvous
from torchmars.cluster.agent import Agent, EndedElsewhere, Left, Restarts, failures_of
from torchmars.cluster.failures import Failure, Kind, first_failure, lost_machines
from torchmars.cluster.logs import RankLogs, keep_apart
from torchmars.cluster.scheduler import in_batch_job
from torchmars.core.console import labelled, say
from torchmars.core.errors import EXIT_MISTAKE, EXIT_STOPPED, EXIT_UNCONNECTED, UserError, say_error
from torchmars.core.timers import unless_done_in

BACKEND = "torchmars"  # rendezvous.py's, which tells us once it is connected


@contextlib.contextmanager
def refused_by_torchrun() -> Iterator[None]:
    """Make a `UserError` of torchrun's errors for options that it cannot take."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        raise UserError(f"torchrun cannot take these options ({error}): see --help") from None


def torchrun(config: LaunchConfig, command: Any) -> elastic_launch:
    """Return the agent that starts the ranks. torch's output from now on goes to a log."""
    logs = cast(RankLogs, config.logs_specs)
    keep_apart(logs.folder / f"launcher-{process.node()}.log")
    return elastic_launch(config, command)


def launch(
    args: argparse.Namespace,
    logs: RankLogs,
    hang: Path,
    hang_seconds: float,
    record: Callable[[Failure], None],
    reached: Callable[[], int],
    start: Callable[[LaunchConfig, Any], Callable[..., object]] = torchrun,
    secret: str | None = None,
) -> int:
    """Start the ranks and wait for their end. Return the exit code, negative for a signal.

    `hang` is the folder of the watchdogs, `hang_seconds` their limit. `record` is called with the
    first failure, on the machine that had it, and `reached` returns the last step that the run has
    reported. `start` starts the ranks. `secret` is RDZV_TOKEN.
    """
    with refused_by_torchrun():
        config, command, arguments = config_from_args(args)
    config.logs_specs, config.rdzv_backend = logs, BACKEND
    failures: list[Failure] = []
    code, by, lost = 0, "", ""
    api.LocalElasticAgent = partial(  # type: ignore[misc, assignment]
        Agent, restarting=Restarts(logs, hang, hang_seconds, record, reached)
    )
    try:
        with guarded_rendezvous(args, secret):
            start(config, command)(*arguments)
    except ChildFailedError as error:
        logs.close()
        failures = failures_of(error.failures, logs, hang, hang_seconds)
    except (Left, EndedElsewhere) as without:
        logs.close()
        return report_left(without) if isinstance(without, Left) else report_spare(without)
    except SignalException as error:
        code, by = 128 + error.sigval, error.sigval.name
    except (RendezvousError, DistError) as error:
        lost = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        refused = isinstance(error, RendezvousStateError)
        if not logs.launch and isinstance(error, RendezvousError):
            return report_refused(args, lost) if refused else report_rendezvous(args, lost)
        failures = [lost_machines(lost)]
    logs.close()
    exit_code = logs.exit_code()
    if exit_code is not None and all(failure.kind == Kind.FALLOUT for failure in failures):
        if lost and exit_code == EXIT_STOPPED:  # the machine whose ranks say so may be gone
            say_stopped(f"and saved: {process.node()} has lost the other machines ({lost})")
        return exit_code
    if not failures:
        if by:
            say_stopped(f"by {by} before it could save")
        return code
    first = first_failure(failures, logs)
    if first in failures:
        record(first)
    if lost and first.kind == Kind.FALLOUT:  # no machine knows more: each says why it ends
        [first] = failures
    report_first(first, logs)
    return first.code


@contextlib.contextmanager
def guarded_rendezvous(args: argparse.Namespace, secret: str | None = None) -> Iterator[None]:
    """End the process where the machines' rendezvous, which is `BACKEND`, does not answer.

    It may wait without end for one that speaks another protocol.
    """
    connected = threading.Event()

    def connect(parameters: RendezvousParameters) -> RendezvousHandler:
        return rendezvous.join(parameters, secret, connected.set)

    def end_if_not_connected() -> None:
        if not connected.is_set():
            os._exit(report_rendezvous(args, "whoever listens there does not answer"))

    rendezvous_handler_registry.register(BACKEND, connect)
    seconds = process.start_timeout().total_seconds() + 3
    with unless_done_in(seconds, end_if_not_connected):
        yield


def say_stopped(how: str) -> None:
    """Print that the run is not complete, where no rank may have said so."""
    say(*labelled("stopped", f"{how}; the same command resumes"))


def report_left(left: Left) -> int:
    """Print that the run goes on without this machine. Return the exit code."""
    say_stopped(f"by {left.sigval.name}: {process.node()} has left the run to the other machines")
    return EXIT_STOPPED


def report_spare(ended: EndedElsewhere) -> int:
    """Print that the run has ended without this machine. Return the exit code."""
    text = f"the run has ended on other machines: {process.node()} had no place in it"
    if ended.code is None:
        say_error(text)
        return EXIT_UNCONNECTED
    say(*labelled("spare", text))
    return ended.code


def report_first(first: Failure, logs: RankLogs) -> None:
    """Print which rank failed first, on any machine, and its error."""
    by_first = first.rank == 0 or first.message.endswith(f" exit code {EXIT_MISTAKE}")
    if first.kind == Kind.CAUSE and first.code == EXIT_MISTAKE and by_first:
        return  # the first rank has printed it
    if first.kind == Kind.CAUSE:
        say_error(
            f"rank {first.rank} on {first.node} failed first: {first.line}: "
            f"all it printed is in {logs.file(first.rank)}"
        )
    elif first.message.startswith("error: "):
        say(first.message, error=True)
    else:
        say_error(first.line)


def report_rendezvous(args: argparse.Namespace, reason: str) -> int:
    """Print that the rendezvous of the machines has failed. Return the exit code.

    The machines of a job run the same command, and may meet at the next try.
    """
    in_job = in_batch_job(os.environ)
    check = "each runs the same command with the same run.name and number of machines"
    say_error(
        f"the {args.nnodes} machines did not meet at {args.rendezvous} ({reason}): check that "
        f"{'all of the job can reach it' if in_job else check}, and that nothing else listens on "
        "that port"
    )
    return EXIT_UNCONNECTED if process.may_meet_later() else EXIT_MISTAKE


def report_refused(args: argparse.Namespace, reason: str) -> int:
    """Print that the rendezvous holds data that is not unpickled. Return the exit code."""
    say_error(
        f"what lies at the rendezvous {args.rendezvous} is from no machine of this run ({reason}): "
        "give all machines the same RDZV_TOKEN, and see who else reaches that port"
    )
    return EXIT_UNCONNECTED
