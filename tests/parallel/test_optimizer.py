"""Clips, norms, telemetry and skips are the whole model's, on every stage and every part of it."""

import math

import pytest
import torch

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.small_runs import run_tables
from tests.support.tiny import write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.optim.tensors import local_part
from torchmars.training.build import build_trainer


def steps_here(tables):
    """Make three steps, the last with a broken gradient on one rank.

    Returns the telemetry after the second and the third, whether the third changed anything here,
    and the tensors that telemetry counts as clipped.
    """
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, optimizer = trainer.model, trainer.optimizer
    for _ in range(2):
        model.backward(trainer.loader.step())
        optimizer.step()
        model.follow_weights()
        optimizer.zero_grad()
    second = optimizer.telemetry()
    before = [value.detach().clone() for value in model.weights.values()]
    model.backward(trainer.loader.step())
    if trainer.layout.world.rank == trainer.layout.world.size - 1:
        gradient = next(iter(model.weights.values())).grad
        local_part(gradient).view(-1)[0] = math.nan
    optimizer.step()
    changed = any(
        not torch.equal(local_part(value), local_part(old))
        for value, old in zip(model.weights.values(), before)
    )
    return second, optimizer.telemetry(), changed


@FULL
@pytest.mark.parametrize("model,layout", [("GPT-2", "PP 2 x TP 2"), ("Llama", "FSDP 2 x TP 2")])
def test_all_ranks_know_the_whole_model(tmp_path, model, layout):
    write_text(tmp_path)
    one, many = (run_tables(tmp_path, model, "mars-m", name) for name in ("1 rank", layout))
    for tables in (one, many):
        # Between the norms of the tensors: some are clipped.
        tables["optimizer"] = tables["optimizer"] | {"clip": 0.05}
        tables["training"] = tables["training"] | {"microbatch_size": 4}
    [(expected, _, _)] = run_ranks(steps_here, 1, one)
    assert expected["matrix/clipped"] > 0
    for second, third, changed in run_ranks(steps_here, 4, many):
        assert second.keys() == expected.keys()
        for name, value in second.items():
            assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert third["skipped_steps"] == 1 and not changed
