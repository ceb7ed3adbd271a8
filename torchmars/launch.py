"""`python -m torchmars.launch [--prepared] [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`: torchrun for the ranks of this machine.

It first does what needs no ranks (prepare.py), unless that has been done, `--prepared`. It ends with the run's own exit code (torchrun makes 1 of every code, and starts ranks again after any but 0: so a rank that has said its last
word leaves its code in a file and ends with 0), keeps what every rank prints (logs.py), and says last what the first rank that failed has said.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 75 stopped by SIGTERM, SIGINT or SIGUSR1, saved, not complete: start
it again; 70 a rank hung (1 where it is blocked outside Python); 128 + n ended by signal n; anything else: a crash.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, determine_local_world_size, parse_args, parse_min_max_nnodes

from torchmars.checkpoint.folder import run_folder
from torchmars.config_file import load_config
from torchmars.console import say
from torchmars.errors import EXIT_HUNG, EXIT_MISTAKE, LAST_WORD, UserError, reported, say_error
from torchmars.failures import Failure, failure_of, first_failure, lost_machines
from torchmars.logs import RankLogs
from torchmars.parallel import mesh
from torchmars.parallel.endpoint import find_endpoint
from torchmars.prepare import prepare

SAVE_SECONDS = 3600  # how long ranks that were asked to stop may take to save; torch 2.11 does not know it, and ends them after 30


def main() -> None:
    with reported(), tempfile.TemporaryDirectory() as scratch:
        prepared, options = sys.argv[1:2] == ["--prepared"], sys.argv[1:]
        args = parse_args(["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT",
                           "--log-dir", scratch, *options[prepared:]])
        nodes = parse_min_max_nnodes(args.nnodes)[1]
        config = load_config(args.training_script_args, "python -m torchmars.launch")
        if not prepared:
            prepare(config, nodes * determine_local_world_size(args.nproc_per_node), nodes)
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
        logs = RankLogs(run_folder(config) / "logs", Path(scratch), shown_ranks(args))
        code = launch(args, logs, last_word)
    sys.exit(code if code >= 0 else 128 - code)  # a negative code is the signal that ended the rank


def shown_ranks(args: argparse.Namespace) -> set[int]:
    """The local ranks whose output the console gets. Raises `UserError`."""
    try:
        return set(map(int, (args.local_ranks_filter or "0").split(",")))
    except ValueError:
        raise UserError(f"LOG_RANK must be numbers of a machine's ranks, separated by commas, got {args.local_ranks_filter!r}") from None


def launch(args: argparse.Namespace, logs: RankLogs, last_word: Path) -> int:
    """Start the ranks and wait for their end; the exit code, negative for a signal."""
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
