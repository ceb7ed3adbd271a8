"""`python -m torchmars.launch [--prepared] [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`: torchrun for the ranks of this machine.

It first does what needs no ranks (prepare.py), unless that has been done, `--prepared`. It ends with the run's own exit code (torchrun makes 1 of every code, and starts ranks again after any but 0: so a rank that has said its last
word leaves its code in a file and ends with 0), keeps what every rank prints (logs.py), and says last what the first rank that failed has said.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 75 stopped by SIGTERM,
SIGINT, SIGHUP or SIGUSR1, saved, not complete: start it again; 70 a rank hung; 128 + n ended by
signal n; anything else: a crash.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from torchmars.cluster.endpoint import find_endpoint
from torchmars.cluster.environment import check_shown, read_variable
from torchmars.cluster.launcher import launch, refused_by_torchrun
from torchmars.cluster.logs import RankLogs
from torchmars.cluster.signals import LAUNCHER, stopping
from torchmars.config.load import load_config
from torchmars.core.errors import (
    EXIT_CODE_FILE,
    refuse,
    reported,
)
from torchmars.core.typed import Range
from torchmars.training.preparation import prepare_run

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
            prepare_run(config, nodes * ranks, nodes)
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # Ranks that are started again must not find the addresses of the dead in the store (torch 2.11 to 2.13 with gloo: every second restart fails).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        args.meeting = args.rdzv_endpoint  # as the user knows it
        if nodes > 1:
            args.rdzv_endpoint, is_host, address = find_endpoint(args.rdzv_endpoint)
            args.local_addr = args.local_addr or address
            args.rdzv_conf += "" if is_host is None else f",is_host={is_host}"
        logs = RankLogs(config.run.path / "logs", Path(scratch), shown)
        os.environ[EXIT_CODE_FILE] = str(logs.exit_code_file)
        code = launch(args, logs, config)
    sys.exit(code if code >= 0 else 128 - code)  # a negative code is the signal that ended the rank


def parse(options: list[str]) -> argparse.Namespace:
    """Torchrun's options. Raises `UserError`."""
    parser = get_args_parser()
    parser.error = refuse
    return parser.parse_args(options)


if __name__ == "__main__":
    main()
