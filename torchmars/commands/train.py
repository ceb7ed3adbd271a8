"""Check a config and train it on this machine's ranks.

The variables of run_train.sh are checked first, before torch is imported: a mistake is reported in
less than a second. Then the config is checked, and launch.py starts the ranks.
"""

import os
import sys
from dataclasses import dataclass

from torchmars.config.load import load_sources, require_config, validate
from torchmars.core import console
from torchmars.core.errors import EXIT_STOPPED, Ended, UserError, exit_on_user_error


@dataclass
class Train:
    """Check a config and train it on this machine's ranks.

    NGPU and the variables listed in run_train.sh set how many ranks and machines.
    """

    # Of run_train.sh, and not in the help.
    prepare: bool = False  # only make the preparations that need no ranks, once for all machines
    prepared: bool = False  # skip what --prepare has done
    complete: bool = False  # only tell whether the run is complete: exit code 0, or else 75
    quiet: bool = False
    """Print only warnings and errors. The logs of the ranks have all."""


def main() -> None:
    """Train the run of the config that the command line names; ends the process."""
    with exit_on_user_error():
        if sys.argv[1:2] == [""]:
            raise UserError("CONFIG_FILE is empty: name a TOML file, or unset it for its default")
        options, sources, rest = load_sources(Train, sys.argv[1:], "torchmars train")
        # Not at the top: help needs nothing of processes.
        from torchmars.cluster import environment, process, sizes

        process.follow_caller()
        variables = environment.read_environment(os.environ)
        config = validate(sources)
        require_config(rest)
        if options.complete:
            from torchmars.records.overview import is_complete  # it brings numpy

            raise Ended(0 if is_complete(config) else EXIT_STOPPED)
        if options.quiet:
            console.quiet = True
        from torchmars.commands import launch

        if options.prepare:
            ranks = launch.ranks_here(variables)
            return launch.prepare(config, sizes.sizes_of(config, variables.NNODES, ranks))
        launch.start_ranks(variables, config, ["-m", "torchmars.train"], rest, options.prepared)
