"""`python -m torchmars.launch [--prepared] [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`: torchrun for the ranks of this machine.

It first does what needs no ranks (prepare.py), unless that has been done, `--prepared`. It ends with the run's own exit code (torchrun makes 1 of every code, and starts ranks again after any but 0: so a rank that has said its last
word leaves its code in a file and ends with 0), keeps what every rank prints (logs.py), and says last what the first rank that failed has said.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 75 stopped by SIGTERM,
SIGINT, SIGHUP or SIGUSR1, saved, not complete: start it again; 70 a rank hung; 128 + n ended by
signal n; anything else: a crash.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from torchmars.checkpoint.folder import run_folder
from torchmars.config import Config
from torchmars.config_file import load_config
from torchmars.console import say
from torchmars.environment import check_shown, read_variable
from torchmars.errors import (
    EXIT_HUNG,
    EXIT_MISTAKE,
    LAST_WORD,
    UserError,
    refuse,
    reported,
    say_error,
)
from torchmars.failures import Failure, Kind, failure_of, first_failure, hang_of, lost_machines
from torchmars.logs import RankLogs
from torchmars.parallel import mesh
from torchmars.parallel.endpoint import find_endpoint
from torchmars.prepare import prepare
from torchmars.signals import LAUNCHER, stopping
from torchmars.typed import Range
from torchmars.watchdog import hang_report, was_blocked

SAVE_SECONDS = 3600  # how long ranks that were asked to stop may take to save; torch 2.11 does not know it, and ends them after 30


def main(options: list[str] | None = None) -> None:
    """Do what the `options`, by default the command line's, ask for; ends the process."""
    with reported(), tempfile.TemporaryDirectory() as scratch:
        options = sys.argv[1:] if options is None else options
        prepared = options[:1] == ["--prepared"]
        signals = (*stopping(), signal.SIGQUIT)  # QUIT is passed on, and ends ranks at once
        args = parse(
            [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
                "--signals-to-handle",
                ",".join(number.name for number in signals),
                "--log-dir",
                scratch,
                *options[prepared:],
            ]
        )
        with refused_by_torchrun():
            nodes = parse_min_max_nnodes(args.nnodes)[1]
            ranks = determine_local_world_size(args.nproc_per_node)
        Range(1, 100_000).check("--nnodes", nodes)
        Range(1, 1_000).check("--nproc-per-node", ranks)
        shown = set(read_variable("LOG_RANK", args.local_ranks_filter or "0"))
        check_shown(list(shown), ranks)
        config = load_config(args.training_script_args, "python -m torchmars.launch")
        if not prepared:
            prepare(config, nodes * ranks, nodes)
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # Ranks that are started again must not find the addresses of the dead in the store (torch 2.11 to 2.13 with gloo: every second restart fails).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        args.meeting = args.rdzv_endpoint  # as the user knows it
        if nodes > 1:
            args.rdzv_endpoint, is_host, address = find_endpoint(args.rdzv_endpoint)
            args.local_addr = args.local_addr or address
            args.rdzv_conf += "" if is_host is None else f",is_host={is_host}"
        logs = RankLogs(run_folder(config) / "logs", Path(scratch), shown)
        os.environ[LAST_WORD] = str(logs.last_word)
        code = launch(args, logs, config)
    sys.exit(code if code >= 0 else 128 - code)  # a negative code is the signal that ended the rank


def parse(options: list[str]) -> argparse.Namespace:
    """Torchrun's options. Raises `UserError`."""
    parser = get_args_parser()
    parser.error = refuse
    return parser.parse_args(options)


@contextlib.contextmanager
def refused_by_torchrun() -> Iterator[None]:
    """Make a `UserError` of what torchrun raises for options that it cannot take."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"torchrun cannot take these options ({error}): see --help") from None


def launch(args: argparse.Namespace, logs: RankLogs, run: Config) -> int:
    """Start the ranks and wait for their end; the exit code, negative for a signal."""
    with refused_by_torchrun():
        config, command, arguments = config_from_args(args)
    config.logs_specs = logs
    connected = threading.Event()

    def connect(parameters: RendezvousParameters) -> RendezvousHandler:
        parameters.backend = "c10d"
        handler = rendezvous_handler_registry.create_handler(parameters)
        connected.set()
        return handler

    def end_if_not_connected() -> None:
        if not connected.is_set():
            os._exit(not_met(args, "whoever listens there does not answer"))

    config.rdzv_backend = "torchmars"  # c10d, but seen to be connected
    rendezvous_handler_registry.register(config.rdzv_backend, connect)
    # It may wait without end for one that speaks another protocol.
    guard = threading.Timer(mesh.patience().total_seconds() + 3, end_if_not_connected)
    guard.daemon = True
    guard.start()
    failures, code = [], 0
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        logs.close()
        failures = failures_of(error, logs, run)
    except SignalException as error:
        code = 128 + error.sigval
    except (RendezvousError, DistError) as error:
        reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        if not logs.launch and isinstance(error, RendezvousError):
            return not_met(args, reason)
        failures = [lost_machines(reason)]
    logs.close()
    word = logs.exit_code()
    if word is not None and all(failure.kind == Kind.FALLOUT for failure in failures):
        return word
    return say_first_failure(failures, logs) if failures else code


def failures_of(error: ChildFailedError, logs: RankLogs, run: Config) -> list[Failure]:
    """How the ranks of this machine ended that did not end well."""
    hang, failures = run_folder(run) / "hang", []
    for rank, ended in error.failures.items():
        if ended.exitcode == EXIT_HUNG or was_blocked(hang, rank, ended.pid):
            stands = hang_report(hang, logs.ranks, run.guards.hang_seconds)
            failures.append(hang_of(rank, ended, stands))
        else:
            failures.append(failure_of(rank, ended, list(logs.last[rank])))
    return failures


def say_first_failure(ours: list[Failure], logs: RankLogs) -> int:
    """Say which rank failed first, on whichever machine, and what it said; its exit code."""
    first = first_failure(ours, logs)
    if first.kind == Kind.CAUSE and first.code == EXIT_MISTAKE:
        pass  # the rank has said it
    elif first.kind == Kind.CAUSE:
        say(
            f"error: rank {first.rank} on {first.node} failed first; all it printed is in {logs.file(first.rank)}:\n{first.message}",
            error=True,
        )
    elif first.message.startswith("error: "):
        say(first.message, error=True)
    else:
        say_error(first.message.splitlines()[-1])
    return first.code


def not_met(args: argparse.Namespace, reason: str) -> int:
    """Say that the machines did not meet; the exit code."""
    say_error(
        f"the {args.nnodes} machines did not meet at {args.meeting} ({reason}): check that each runs the same command with the "
        "same NNODES, and that nothing else listens on that port"
    )
    return EXIT_MISTAKE


if __name__ == "__main__":
    main()
