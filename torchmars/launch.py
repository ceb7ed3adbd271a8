"""`python -m torchmars.launch [--prepared] [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`: torchrun for the ranks of this machine.

It first does what needs no ranks (prepare.py), unless that has been done, `--prepared`. It ends with the run's own exit code (torchrun makes 1 of every code, and starts ranks again after any but 0: so a rank that has said its last
word leaves its code in a file and ends with 0), keeps what every rank prints (logs.py), and says last what the first rank that failed has said.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 75 stopped by SIGTERM, SIGINT or SIGUSR1, saved, not complete: start
it again; 70 a rank hung (1 where it is blocked outside Python); 128 + n ended by signal n; anything else: a crash.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import (config_from_args, determine_local_world_size, get_args_parser,
                                   parse_min_max_nnodes)

from torchmars.checkpoint.folder import run_folder
from torchmars.config_file import load_config
from torchmars.console import say
from torchmars.environment import check_shown, read_variable
from torchmars.errors import (EXIT_HUNG, EXIT_MISTAKE, LAST_WORD, UserError, refuse, reported,
                              say_error)
from torchmars.failures import Failure, failure_of, first_failure, lost_machines
from torchmars.logs import RankLogs
from torchmars.parallel import mesh
from torchmars.parallel.endpoint import find_endpoint
from torchmars.prepare import prepare
from torchmars.typed import Range

SAVE_SECONDS = 3600  # how long ranks that were asked to stop may take to save; torch 2.11 does not know it, and ends them after 30


def main(options: list[str] | None = None) -> None:
    """Do what the `options`, by default the command line's, ask for; ends the process."""
    with reported(), tempfile.TemporaryDirectory() as scratch:
        options = sys.argv[1:] if options is None else options
        prepared = options[:1] == ["--prepared"]
        args = parse(["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                      "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT",
                      "--log-dir", scratch, *options[prepared:]])
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
        last_word = Path(scratch) / "exit-code"
        os.environ[LAST_WORD] = str(last_word)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # Ranks that are started again must not find the addresses of the dead in the store (torch 2.11 to 2.13 with gloo: every second restart fails).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        args.meeting = args.rdzv_endpoint  # as the user knows it
        if nodes > 1:
            args.rdzv_endpoint, is_host, address = find_endpoint(args.rdzv_endpoint)
            args.local_addr = args.local_addr or address
            args.rdzv_conf += "" if is_host is None else f",is_host={is_host}"
        logs = RankLogs(run_folder(config) / "logs", Path(scratch), shown)
        code = launch(args, logs, last_word)
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


def launch(args: argparse.Namespace, logs: RankLogs, last_word: Path) -> int:
    """Start the ranks and wait for their end; the exit code, negative for a signal."""
    with refused_by_torchrun():
        config, command, arguments = config_from_args(args)
    config.logs_specs = logs

    def end_if_not_met() -> None:
        if not logs.launch:  # torchrun has started no rank
            os._exit(not_met(args, "whoever listens there does not answer"))

    guard = threading.Timer(mesh.patience().total_seconds() + 3, end_if_not_met)  # it may wait without end for one that speaks another protocol
    guard.daemon = True
    guard.start()
    try:
        elastic_launch(config, command)(*arguments)
        code = 0
    except ChildFailedError as error:
        logs.close()
        code = say_first_failure([failure_of(rank, ended, list(logs.last[rank])) for rank, ended in error.failures.items()], logs)
        last_word.unlink(missing_ok=True)
    except SignalException as error:
        code = 128 + error.sigval
    except RendezvousError as error:
        reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        code = say_first_failure([lost_machines(reason)], logs) if logs.launch else not_met(args, reason)
    logs.close()
    return int(last_word.read_text()) if last_word.exists() else code


def say_first_failure(ours: list[Failure], logs: RankLogs) -> int:
    """Say which rank failed first, on whichever machine, and what it said; its exit code."""
    first = first_failure(ours, logs)
    if first.code in (EXIT_MISTAKE, EXIT_HUNG):  # those have said it
        return first.code
    if first.consequence:
        say_error(first.message.splitlines()[-1].removeprefix("LostRank: "))
    else:
        say(f"error: rank {first.rank} on {first.node} failed first; all it printed is in {logs.file(first.rank)}:\n{first.message}", error=True)
    return first.code


def not_met(args: argparse.Namespace, reason: str) -> int:
    """Say that the machines did not meet; the exit code."""
    say_error(f"the {args.nnodes} machines did not meet at {args.meeting} ({reason}): check that each runs the same command with the "
              "same NNODES, and that nothing else listens on that port")
    return EXIT_MISTAKE


if __name__ == "__main__":
    main()
