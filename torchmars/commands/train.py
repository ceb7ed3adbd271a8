"""Check a config and train it on this machine's ranks.

The variables of run_train.sh are checked first, then the config, both before torch is imported: a
mistake is reported in less than a second. Then launch.py starts the ranks.
"""

import os
import sys
from dataclasses import dataclass

from torchmars.cluster.environment import (
    check_shown,
    check_temporary_folder,
    cores_of,
    read_environment,
)
from torchmars.config.load import load_command, require_config
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.options import take_options


@dataclass
class Train:
    """Check a config and train it on this machine's ranks.

    NGPU and the other variables that run_train.sh lists say on how many, and with which machines.
    """

    prepare: bool = False
    """Only do what needs no ranks, once for all machines."""
    prepared: bool = False
    """Leave that out, since it has been done."""


def main() -> None:
    """Train the run of the config that the command line names; ends the process."""
    with exit_on_user_error():
        options, rest = take_options(Train, sys.argv[1:])
        if rest[:1] == [""]:
            raise UserError("CONFIG_FILE is empty: name a TOML file, or unset it for its default")
        environment = read_environment(os.environ)
        check_temporary_folder()
        _, config = load_command(Train, sys.argv[1:], "torchmars train")
        require_config(rest)
        ranks = environment.NGPU or default_ranks()
        check_shown(environment.LOG_RANK, ranks)
        os.environ.update(environment.rank_variables(ranks, cores_of(os.environ)))
        if options.prepare:
            from torchmars.training.preparation import prepare_run

            return prepare_run(config, ranks * environment.NNODES, environment.NNODES)
        from torchmars.commands import launch

        job = os.environ.get("SLURM_JOB_ID") or "torchmars"
        own = ["--prepared"] if options.prepared else []
        torchrun = environment.torchrun_options(ranks, job)
        launch.main([*own, *torchrun, "-m", "torchmars.train", *rest])


def default_ranks() -> int:
    """Return a rank for each GPU of this machine; 2 on a machine without."""
    import torch

    return torch.cuda.device_count() or 2
