"""Start this machine's ranks of a program that calls `torchmars.train.main`.

`torchmars launch (-m MODULE | PROGRAM.py) CONFIG.toml [--section.key value ...]`

First it makes the preparations that need no ranks (training/preparation.py). Then it meets the
other machines and starts ranks (cluster/launcher.py). All that a rank prints is kept
(cluster/failures.py). The last message comes from the first rank that failed.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 69 machines or ranks did
not connect in time, or a machine was lost: start it again; 70 a rank hung; 75 stopped by SIGTERM,
SIGINT, SIGHUP or SIGUSR1, saved, not complete: start it again; 128 + n ended by signal n; anything
else: a crash.
"""

import contextlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

from torchmars.checkpoint.memory.shared_memory import shared_memory
from torchmars.cluster import process
from torchmars.cluster.endpoint import find_store
from torchmars.cluster.environment import Environment, keep_compiled_in, read_environment
from torchmars.cluster.failures import Failure, RankLogs, keep_apart
from torchmars.cluster.launcher import RankLauncher
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.scheduler import JOB
from torchmars.cluster.sizes import UsableSizes, sizes_of
from torchmars.config import ResolvedConfig
from torchmars.config.load import load_config, require_config
from torchmars.core.console import labelled, say
from torchmars.core.device import visible_gpus
from torchmars.core.errors import Ended, UserError, exit_on_user_error
from torchmars.core.files import own_cores
from torchmars.planning.plan import check_gpu_memory
from torchmars.records.events import EventLog
from torchmars.records.lines import METRICS_FILE, last_step
from torchmars.training.preparation import prepare_run


def main() -> None:
    """Start the ranks of the program that the command line names; ends the process."""
    with exit_on_user_error():
        words = sys.argv[1:]
        if words[:1] in (["-h"], ["--help"]):
            return say(str(__doc__))
        count = 1 + (words[:1] == ["-m"])
        program, arguments = words[:count], words[count:]
        if len(program) < count:
            raise UserError("name what ranks run: torchmars launch PROGRAM.py CONFIG.toml")
        environment = read_environment(os.environ)
        config = load_config(arguments, "torchmars launch")
        require_config(arguments)
        start_ranks(environment, config, program, arguments, prepared=False)


def start_ranks(
    environment: Environment,
    config: ResolvedConfig,
    program: list[str],
    arguments: list[str],
    prepared: bool,
) -> NoReturn:
    """Start the ranks of this machine, which run `program` with `arguments`; ends the process.

    `environment` has the variables of run_train.sh. Raises `UserError`.
    """
    os.environ.pop("RDZV_TOKEN", None)  # ranks and other processes do not get it
    ranks = ranks_here(environment)
    threads = environment.OMP_NUM_THREADS or max(1, own_cores() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["RDZV_TIMEOUT"] = str(environment.start_seconds(ranks))
    config.run.check_links()
    keep_compiled_in(config.run.compile_cache)
    sizes = sizes_of(config, environment.NNODES, ranks)
    if not prepared:
        prepare(config, sizes)
    if sizes.asked.elastic:
        # Microbatches that grow as ranks go might not fit.
        arguments = [*arguments, "--training.microbatch_size", str(sizes.microbatch_size)]
        os.environ[process.FEWEST] = str(sizes.ranks[0])
    if program[-1] == "torchmars.train":  # others import from their own folder
        os.environ.update(process.found_as_here(os.environ))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = config.run.path
        logs = RankLogs(folder / "logs", Path(scratch), {*environment.LOG_RANK})
        launcher = RankLauncher(
            [sys.executable, "-u", *program, *arguments],
            ranks,
            meet(environment, sizes, os.environ.get(JOB) or config.run.name),
            environment.RDZV_ENDPOINT or "",
            logs,
            config.run.hang,
            environment.MAX_RESTARTS,
            partial(last_step, folder / METRICS_FILE),
            partial(record_failure, folder),
        )
        keep_apart(logs.folder / f"launcher-{process.node()}.log")
        copies = config.checkpoint.memory_interval > 0
        with shared_memory() if copies else contextlib.nullcontext():
            code = launcher.run()
    raise Ended(code)


def ranks_here(environment: Environment) -> int:
    """Return how many ranks this machine starts."""
    return environment.NGPU or len(visible_gpus()) or 2


def prepare(config: ResolvedConfig, sizes: UsableSizes) -> None:
    """Make the preparations that need no ranks, once for all machines. Raises `UserError`."""
    if sizes.asked.elastic:
        say("\n".join(sizes.in_words()))
        check_gpu_memory(config, sizes)
    prepare_run(config, sizes.ranks, sizes.usable[-1])


def meet(environment: Environment, sizes: UsableSizes, run_id: str) -> Machines:
    """Return the rendezvous of this machine and the others. Raises `UserError`."""
    endpoint = environment.RDZV_ENDPOINT
    if sizes.asked.most == 1 or not endpoint:
        return Machines(run_id, environment, sizes)
    if environment.RDZV_TOKEN is None:
        text = (
            f"whoever reaches {endpoint} can join this run: set RDZV_TOKEN to the same secret "
            "on all machines"
        )
        say(*labelled("warning", text), error=True)
    found = find_store(endpoint, environment.NODE_RANK)
    return Machines(run_id, environment, sizes, *found)


def record_failure(folder: Path, step: int, failure: Failure) -> None:
    """Add the failure of a rank, after `step`, to the events of the run in `folder`."""
    facts = {name: getattr(failure, name) for name in ("rank", "code", "message")}
    EventLog(folder).add("failed", step, machine=process.node(), **facts)
