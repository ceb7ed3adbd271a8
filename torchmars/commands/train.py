"""The variables of run_train.sh, and what it starts with them.

`python -m torchmars train [--prepare|--prepared] CONFIG.toml [--section.key value ...]`

It checks the variables that run_train.sh takes, then the config, both before it imports torch: a
mistake is reported in less than a second. Then it starts the ranks of this machine (launch.py).
`--prepare` does only what needs no ranks, once for all machines; `--prepared` leaves that out.
"""

import os
import sys

from torchmars.cluster.environment import check_shown, cores_of, read_environment
from torchmars.config.load import load_config
from torchmars.core.errors import UserError, reported


def main() -> None:
    with reported():
        first = sys.argv[1:2]
        mode = first if first in (["--prepare"], ["--prepared"]) else []
        args = sys.argv[1 + len(mode) :]
        if args[:1] == [""]:
            raise UserError("CONFIG_FILE is empty: name a TOML file, or unset it for its default")
        environment = read_environment(os.environ)
        config = load_config(args, "python -m torchmars.train")
        ranks = environment.NGPU or default_ranks()
        check_shown(environment.LOG_RANK, ranks)
        os.environ.update(environment.for_ranks(ranks, cores_of(os.environ)))
        if mode == ["--prepare"]:
            from torchmars.training.preparation import prepare_run

            return prepare_run(config, ranks * environment.NNODES, environment.NNODES)
        from torchmars.commands import launch

        options = environment.torchrun_options(ranks, os.environ.get("SLURM_JOB_ID") or "torchmars")
        launch.main([*mode, *options, "-m", "torchmars.train", *args])


def default_ranks() -> int:
    """A rank for each GPU of this machine; 2 on a machine without."""
    import torch

    return torch.cuda.device_count() or 2


if __name__ == "__main__":
    main()
