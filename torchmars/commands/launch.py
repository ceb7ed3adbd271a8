"""Start this machine's ranks as torchrun does, with the run's own exit code and logs.

`torchmars launch [--prepared] [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`

First it makes the preparations that need no ranks (training/preparation.py), unless that was done:
`--prepared`. torchrun makes 1 of every exit code, and starts ranks again after any but 0. Here the
run's own code comes out (cluster/launcher.py). All that a rank prints is kept (cluster/logs.py).
The last message comes from the first rank that failed.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 69 machines or ranks did
not connect in time, or a machine was lost: start it again; 70 a rank hung; 75 stopped by SIGTERM,
SIGINT, SIGHUP or SIGUSR1, saved, not complete: start it again; 128 + n ended by signal n; anything
else: a crash.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

from torch.distributed.run import determine_local_world_size, get_args_parser

from torchmars.checkpoint.memory.shared_memory import shared_memory
from torchmars.cluster import process
from torchmars.cluster.callers import found_as_here
from torchmars.cluster.endpoint import answers, find_endpoint
from torchmars.cluster.environment import check_copies, check_shown, keep_compiled_in, read_variable
from torchmars.cluster.failures import Failure
from torchmars.cluster.launcher import launch, refused_by_torchrun
from torchmars.cluster.logs import RankLogs
from torchmars.cluster.scheduler import of_elastic_job, requeue_without_script
from torchmars.cluster.signals import LAUNCHER, stopping
from torchmars.cluster.sizes import UsableSizes, read_bounds, sizes_of
from torchmars.config import ResolvedConfig
from torchmars.config.load import load_config, require_config
from torchmars.core.bounds import Range
from torchmars.core.console import labelled, say
from torchmars.core.errors import EXIT_CODE_FILE, Ended, UserError, exit_on_user_error
from torchmars.core.typed import make
from torchmars.planning.plan import check_gpu_memory
from torchmars.records.events import EventLog
from torchmars.records.lines import METRICS_FILE, last_step
from torchmars.training.preparation import prepare_run

# How long ranks that were asked to stop may take to save. torch 2.11 ends them after 30 seconds.
SAVE_SECONDS = 3600


Ranks = Annotated[int, Range(1, 1_000)]


def main(options: list[str] | None = None, config: ResolvedConfig | None = None) -> None:
    """Start the ranks that `options`, by default the command line's, ask for; ends the process.

    `config` is theirs, if it has been read.
    """
    with exit_on_user_error(), tempfile.TemporaryDirectory() as scratch:
        options = sys.argv[1:] if options is None else options
        secret = os.environ.pop("RDZV_TOKEN", None)  # ranks and other processes do not get it
        if secret is not None:
            secret = read_variable("RDZV_TOKEN", secret)
        prepared = options[:1] == ["--prepared"]
        signals = (*stopping(), signal.SIGQUIT)  # QUIT is passed on, and ends ranks at once
        args = parse_torchrun(
            [
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                f"--signals-to-handle={','.join(number.name for number in signals)}",
                f"--log-dir={scratch}",
                *options[prepared:],
            ]
        )
        with refused_by_torchrun():
            ranks = determine_local_world_size(args.nproc_per_node)
        machines = read_bounds(args.nnodes, "--nnodes")
        if config is None:  # torchmars train has looked
            check_copies(os.environ, machines)
        make(Ranks, ranks, name="--nproc-per-node")
        option = "--local-ranks-filter"
        shown = set(read_variable("LOG_RANK", args.local_ranks_filter or "0", option))
        check_shown(list(shown), ranks, option)
        config = config or load_config(args.training_script_args, "torchmars launch")
        require_config(args.training_script_args)
        config.run.check_links()
        keep_compiled_in(config.run.compile_cache)
        args.sizes = sizes_of(config, machines, ranks)
        if not prepared:
            prepare(config, args.sizes)
        if machines.elastic:
            make_elastic(args)
        if args.training_script == "torchmars.train":  # others import from their own folder
            os.environ.update(found_as_here(os.environ))
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # Ranks that are started again must not find the addresses of the dead in the store: with
        # gloo every second restart fails (torch 2.11 to 2.15). And the launcher must not listen.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        announce(args, secret)
        logs = RankLogs(config.run.path / "logs", Path(scratch), shown)
        os.environ[EXIT_CODE_FILE] = str(logs.exit_code_file)
        hang, hang_seconds = config.run.hang, config.guards.hang_seconds
        record = partial(record_failure, config.run.path)
        reached = partial(last_step, config.run.path / METRICS_FILE)
        copies = config.checkpoint.memory_interval > 0
        with shared_memory() if copies else contextlib.nullcontext():
            code = launch(args, logs, hang, hang_seconds, record, reached, secret=secret)
        if of_elastic_job(os.environ) and not answers(args.rendezvous):
            requeue_without_script(os.environ)
    # A negative code is the signal that ended the rank.
    raise Ended(code if code >= 0 else 128 - code)


def make_elastic(args: argparse.Namespace) -> None:
    """Set options and variables of a run whose machines come and go."""
    args.signals_to_handle = signal.SIGQUIT.name  # its agent takes the others
    # Microbatches that grow as ranks go might not fit.
    args.training_script_args += ["--training.microbatch_size", str(args.sizes.microbatch_size)]
    # torch then asks no machine of a round, which may be lost by now, for its ranks.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.environ[process.FEWEST] = str(args.sizes.ranks[0])


def prepare(config: ResolvedConfig, sizes: UsableSizes) -> None:
    """Make the preparations that need no ranks, once for all machines. Raises `UserError`."""
    if sizes.asked.elastic:
        say("\n".join(sizes.in_words()))
        check_gpu_memory(config, sizes)
    prepare_run(config, sizes.ranks, sizes.usable[-1])


def announce(args: argparse.Namespace, secret: str | None) -> None:
    """Put where the launchers of `args.sizes` machines meet into torchrun's options.

    Raises `UserError` if they cannot connect.
    """
    args.rendezvous = args.rdzv_endpoint  # as the user knows it
    if args.sizes.asked.most == 1:
        args.local_addr = "127.0.0.1"
        return
    if secret is None:
        text = (
            f"whoever reaches {args.rendezvous} can join this run: set RDZV_TOKEN to the same "
            "secret on all machines"
        )
        say(*labelled("warning", text), error=True)
    args.rdzv_endpoint, is_host, address = find_endpoint(args.rdzv_endpoint)
    args.local_addr = args.local_addr or address
    usable, ranks = "/".join(map(str, args.sizes.usable)), args.sizes.per_machine
    options = [*filter(None, [args.rdzv_conf]), f"usable={usable}", f"per_machine={ranks}"]
    options += [] if is_host is None else [f"is_host={is_host}"]
    args.rdzv_conf = ",".join(options)


def record_failure(folder: Path, failure: Failure) -> None:
    """Add the failure of a rank to the events of the run in `folder`."""
    EventLog(folder).add(
        "failed",
        last_step(folder / METRICS_FILE),
        rank=failure.rank,
        machine=failure.node,
        code=failure.code,
        message=failure.message,
    )


def parse_torchrun(options: list[str]) -> argparse.Namespace:
    """Return torchrun's options. Raises `UserError`."""
    parser = get_args_parser()
    # mypy allows no assignment to a method.
    setattr(parser, "error", refuse)  # noqa: B010
    setattr(parser, "exit", leave)  # noqa: B010, of --help
    return parser.parse_args(options)


def refuse(message: str) -> NoReturn:
    """Raise the `UserError` of options that torchrun's parser cannot take."""
    raise UserError(f"{message}: see --help")


def leave(status: int = 0, message: str | None = None) -> NoReturn:
    """End the process, as torchrun's parser does once it has printed its help."""
    raise Ended(status)
