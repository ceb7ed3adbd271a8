"""`python -m torchmars.prepare CONFIG.toml [--section.key value ...]`: all of a run that needs no ranks.

Checks the config, tokenises its corpus into shards once, verifies the shards, and checks that the run can go on from
the checkpoints it has. With `--ranks N` before the overrides, also that the batch divides over N ranks; `--nodes M`: on M machines.
"""

import sys

from torchmars.config.load import load_config, take_count
from torchmars.core.console import say
from torchmars.core.errors import UserError, reported
from torchmars.data import sources
from torchmars.training.preparation import prepare_run


def main() -> None:
    with reported():
        args, ranks = take_count(sys.argv[1:], "--ranks", 1)
        args, nodes = take_count(args, "--nodes", 1)
        if ranks % nodes:
            raise UserError(
                f"--ranks {ranks} does not divide over --nodes {nodes}: "
                f"choose a multiple of {nodes}"
            )
        config = load_config(args, "python -m torchmars.prepare [--ranks N] [--nodes M]")
        prepare_run(config, ranks, nodes)
        if warning := sources.warning(config.data):
            say(warning)


if __name__ == "__main__":
    main()
