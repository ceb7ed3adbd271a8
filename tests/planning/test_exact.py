"""The formulas against a table of exact plans.

The table is from a simulation of a step in fake tensors, which the project had up to df7e0b23:
every file of train_configs and eight models along each axis, on GPUs, eight on a machine, and what
its search for layouts proposed in eight cases. A third of its rows ("held out") was not looked at
while the formulas were written.
"""

import csv
from pathlib import Path

import pytest
import torch

from torchmars.config.load import load_config
from torchmars.config.ranks import resolve_dtypes
from torchmars.planning.memory import ModelCosts
from torchmars.planning.plan import Plan

TABLE = Path(__file__).with_name("exact.csv")
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))
FILES = sorted({row["args"].split()[0] for row in ROWS})
DENSE, OTHER = 0.10, 0.20  # of experts, pipelines and context


COSTS = {}  # of each model and optimizer, which rows share


def planned(row):
    """The plan of a row."""
    config = load_config(row["args"].split(), "in a test")
    key = repr((config.model, config.optimizer))
    if key not in COSTS:
        COSTS[key] = ModelCosts(config, 8)
    config = resolve_dtypes(config, torch.device("cuda"), True)
    return Plan(COSTS[key], config, int(row["ranks"]))


@pytest.mark.parametrize("file", FILES)
def test_plans_are_those_of_the_table(file):
    """Shards and checkpoints to the byte, the peak to 10% or 20%, time and traffic to 2%."""
    for row in ROWS:
        if row["args"].split()[0] != file:
            continue
        plan = planned(row)
        rank = plan.ranks[int(row["rank"])]
        found = {"weights": rank.weights, "gradients": rank.gradients}
        found |= {"state": rank.optimizer_state, "checkpoint": plan.checkpoint}
        assert found == {name: int(row[name] or found[name]) for name in found}, row
        harder = plan.degrees.pp > 1 or plan.degrees.cp > 1 or plan.whole.experts
        assert plan.largest.peak == pytest.approx(
            int(row["peak"]), rel=OTHER if harder else DENSE
        ), row
        assert plan.seconds == pytest.approx(float(row["seconds"]), rel=0.02), row
        sent = max(sum(each.size for each in sent) for sent in plan.passes)
        assert sent == pytest.approx(int(row["sent"]), rel=0.02, abs=2**20), row
