"""Print the memory, traffic and time of a run before it has a cluster."""

import sys
from dataclasses import dataclass
from typing import Annotated

from torchmars.config.load import is_set, load_command, load_sources
from torchmars.core.bounds import Range
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.metrics.gpus import GIB


@dataclass
class PlanOptions:
    """Print what a run will take of each rank, before it has a cluster.

    Makes one step of the run's own model, sharding and optimizer on one CPU, without ranks and
    without memory. Prints the memory and traffic of each rank, how evenly matrices are distributed,
    and warnings of likely mistakes.
    """

    world_size: Annotated[int, Range(1, 100_000)]
    """Ranks to plan for. Always needed."""
    gpus_per_node: Annotated[int, Range(0, 100_000)] = 8
    """GPUs of each machine. 0: machines without GPUs."""
    find: bool = False
    """Plan up to 8 layouts that a rule of thumb proposes, and print a row of each with its options
    to paste. Takes about as long as 8 plans: minutes for large models."""
    memory: Annotated[int, Range(1, 100_000)] = 80
    """With --find: memory of each GPU in GiB."""


def main() -> None:
    """Print the plan of the config that the command line names."""
    with exit_on_user_error():
        options, config, settings = load_command(PlanOptions, sys.argv[1:], "torchmars plan")
        from torchmars.planning import find, plan, report

        ranks, per_node = options.world_size, options.gpus_per_node
        if options.find:
            for line in find.find_layouts(config, ranks, per_node, options.memory * GIB):
                say(line)
        else:
            lr_is_set = is_set(load_sources(settings, "torchmars plan"), "optimizer.lr")
            planned = plan.plan_rank(config, ranks, per_node)
            say(*report.plan_in_words(planned, default_lr=not lr_is_set))
