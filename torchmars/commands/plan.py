"""Print the memory, traffic and time of a run before it has a cluster."""

import sys
from dataclasses import dataclass
from typing import Annotated

from torchmars.config.load import is_set, load_command, load_sources
from torchmars.core.bounds import Range
from torchmars.core.console import labelled, say
from torchmars.core.errors import exit_on_user_error


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
        from torchmars.metrics.throughput import GIB
        from torchmars.planning.find import find_layouts
        from torchmars.planning.plan import plan_rank
        from torchmars.planning.report import plan_in_words
        from torchmars.training.default_lr import default_lr_warnings

        ranks, per_node = options.world_size, options.gpus_per_node
        if options.find:
            for line in find_layouts(config, ranks, per_node, options.memory * GIB):
                say(line)
        else:
            lines = plan_in_words(plan_rank(config, ranks, per_node))
            if not is_set(load_sources(settings, "torchmars plan"), "optimizer.lr"):
                for text in default_lr_warnings(config):
                    lines += labelled("warning", text)
            say(*lines)
