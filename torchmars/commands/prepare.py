"""Do all of a run that needs no ranks: its checks, and the tokenising of its text."""

import sys
from dataclasses import dataclass
from typing import Annotated

from torchmars.config.load import load_command
from torchmars.core.bounds import Range
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.data import sources
from torchmars.training.preparation import prepare_run


@dataclass
class Prepare:
    """Do all of a run that needs no ranks.

    Checks the config, tokenises its corpus into shards once, verifies the shards, and checks that
    the run can go on from the checkpoints it has.
    """

    ranks: Annotated[int, Range(1, 100_000)] = 1
    """Ranks that the batch must divide over."""
    nodes: Annotated[int, Range(1, 100_000)] = 1
    """Machines that the ranks run on."""


def main() -> None:
    """Prepare the run of the config that the command line names."""
    with exit_on_user_error():
        options, config = load_command(Prepare, sys.argv[1:], "torchmars prepare")
        if options.ranks % options.nodes:
            raise UserError(
                f"--ranks {options.ranks} does not divide over --nodes {options.nodes}: "
                f"choose a multiple of {options.nodes}"
            )
        prepare_run(config, options.ranks, options.nodes)
        for corpus in config.data.corpora():
            if warning := sources.warning(corpus):
                say("\n".join(labelled("warning", warning)))


if __name__ == "__main__":
    main()
