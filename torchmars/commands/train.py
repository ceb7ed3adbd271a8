"""Check a config and train it on this machine's ranks.

The variables of run_train.sh are checked first, then the config, both before torch is imported: a
mistake is reported in less than a second. Then launch.py starts the ranks.
"""

import logging
import os
import sys
from dataclasses import dataclass

from torchmars.cluster import process
from torchmars.cluster.environment import check_copies, check_temporary_folder, read_environment
from torchmars.cluster.scheduler import in_batch_job
from torchmars.cluster.sizes import sizes_of
from torchmars.config.load import load_command, require_config
from torchmars.core import console
from torchmars.core.errors import EXIT_STOPPED, Ended, UserError, exit_on_user_error


@dataclass
class Train:
    """Check a config and train it on this machine's ranks.

    NGPU and the variables listed in run_train.sh set how many ranks and machines.
    """

    prepare: bool = False
    """Only make the preparations that need no ranks, once for all machines."""
    prepared: bool = False
    """Skip what --prepare has done."""
    complete: bool = False
    """Only tell whether the run is complete: exit code 0, or else 75."""
    quiet: bool = False
    """Print only warnings and errors. The logs of the ranks have all."""


def main() -> None:
    """Train the run of the config that the command line names; ends the process."""
    process.follow_caller()
    with exit_on_user_error():
        if sys.argv[1:2] == [""]:
            raise UserError("CONFIG_FILE is empty: name a TOML file, or unset it for its default")
        check_temporary_folder()
        options, config, rest = load_command(Train, sys.argv[1:], "torchmars train")
        environment = read_environment(os.environ)
        by_script = options.prepare or options.prepared or options.complete
        if not (by_script and in_batch_job(os.environ)):  # run_train.sh counts a job's machines
            check_copies(os.environ, environment.NNODES)
        require_config(rest)
        if options.complete:
            from torchmars.records.overview import is_complete  # it brings numpy

            raise Ended(0 if is_complete(config) else EXIT_STOPPED)
        if options.quiet:
            console.logger.setLevel(logging.WARNING)
        from torchmars.commands import launch

        if options.prepare:
            ranks = environment.NGPU or process.local_gpus() or 2
            return launch.prepare(config, sizes_of(config, environment.NNODES, ranks))
        launch.start_ranks(environment, config, ["-m", "torchmars.train"], rest, options.prepared)
