"""`python -m torchmars.plan CONFIG.toml --world-size N [--gpus-per-node 8] [--section.key value ...]`: what a run will take, before it has a cluster.

Makes one step of the run's own model, sharding and optimizer on one CPU, without ranks and without memory, and prints what each rank holds
and sends, how evenly matrices are dealt out, and what an expert would warn of. `--gpus-per-node 0` plans for machines without GPUs.
"""

import sys

from torchmars.config.load import load_config, take_count
from torchmars.core.console import say
from torchmars.core.errors import UserError, reported
from torchmars.planning.plan import make_plan
from torchmars.planning.report import report


def main() -> None:
    with reported():
        if {"-h", "--help"} & set(sys.argv):
            say(__doc__)
        elif "--world-size" not in sys.argv:
            raise UserError("--world-size N is missing: the number of ranks to plan for")
        args, world_size = take_count(sys.argv[1:], "--world-size", 1)
        args, per_node = take_count(args, "--gpus-per-node", 8, least=0)
        config = load_config(args, "python -m torchmars.plan --world-size N [--gpus-per-node 8]")
        say("\n".join(report(make_plan(config, world_size, per_node))))


if __name__ == "__main__":
    main()
