"""Print what a run will take of each rank, before it has a cluster."""

import sys
from dataclasses import dataclass
from typing import Annotated

from torchmars.config.load import load_command
from torchmars.core.bounds import Range
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.planning.plan import make_plan
from torchmars.planning.report import report


@dataclass
class Plan:
    """Print what a run will take of each rank, before it has a cluster.

    Makes one step of the run's own model, sharding and optimizer on one CPU, without ranks and
    without memory. Prints what each rank holds and sends, how evenly matrices are dealt out, and
    what an expert would warn of.
    """

    world_size: Annotated[int, Range(1, 100_000)]
    """Ranks to plan for."""
    gpus_per_node: Annotated[int, Range(0, 100_000)] = 8
    """GPUs of each machine. 0: machines without GPUs."""


def main() -> None:
    """Print the plan of the config that the command line names."""
    with exit_on_user_error():
        options, config = load_command(Plan, sys.argv[1:], "torchmars plan")
        say("\n".join(report(make_plan(config, options.world_size, options.gpus_per_node))))


if __name__ == "__main__":
    main()
