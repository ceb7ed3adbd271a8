"""Print the memory, traffic and time of a run before it has a cluster."""

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from torchmars.cluster.sizes import MinMax, read_bounds, sizes_of
from torchmars.config.load import load_command
from torchmars.core.check import Interval
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.records.gpus import GIB


@dataclass
class PlanOptions:
    """Print what a run will take of each rank, before it has a cluster.

    Computes it from shapes, in seconds. Prints the memory and traffic of each rank, how evenly
    matrices are distributed, and whether a rank fits a GPU.
    """

    world_size: str
    """Ranks to plan for. Always needed. MIN:MAX, as in 16:32: an elastic run, of whole machines.
    Prints the numbers that are usable, and plans the fewest, where memory is the tightest."""
    gpus_per_node: Annotated[int, Interval(0, 100_000)] = 8
    """GPUs of each machine. 0: machines without GPUs; those of an elastic run have one rank
    each."""
    find: bool = False
    """Plan every layout that divides, and print the fastest that fit, with their options to
    paste."""
    memory: Annotated[int, Interval(1, 100_000)] = 80
    """With --find: memory of each GPU in GiB."""


def main() -> None:
    """Print the plan of the config that the command line names."""
    with exit_on_user_error():
        options, config, settings = load_command(PlanOptions, sys.argv[1:], "torchmars plan")
        from torchmars.planning import find, plan, report

        asked, per_node = read_bounds(options.world_size, "--world-size"), options.gpus_per_node
        ranks, sizes, here = asked.fewest, None, per_node or 1
        check_machines(*asked, here)
        if asked.elastic:
            if options.find:
                raise UserError(f"--find takes one number of ranks, got --world-size {asked}")
            sizes = sizes_of(config, MinMax(asked.fewest // here, asked.most // here), here)
            ranks = sizes.ranks[0]
            shared = replace(config.training, microbatch_size=sizes.microbatch_size)
            config = replace(config, training=shared)
        if options.find:
            say(*find.find_layouts(config, ranks, per_node, options.memory * GIB))
        else:
            say(*report.plan_in_words(plan.plan_run(config, ranks, per_node), sizes))


def check_machines(fewest: int, most: int, here: int) -> None:
    """Raise `UserError` unless ranks fill machines of `here` ranks, or a part of one alone."""
    if any(each % here and (fewest < most or each > here) for each in (fewest, most)):
        raise UserError(
            f"--world-size {MinMax(fewest, most)} does not fill machines of --gpus-per-node "
            f"{here}: choose multiples of {here}"
        )
