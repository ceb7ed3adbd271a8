"""What a rank sends to experts and back: in a plan, in a run, and by the formula."""

from collections import Counter
from itertools import product

import pytest
import torch.distributed as dist

from tests.planning.even_routing import MIXTURE, route_evenly
from tests.support.full import FULL, full_but
from tests.support.gradients import model_on, training_on
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, write_text
from tests.support.traffic import TrafficCounter
from torchmars.cluster import connection
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.config.load import config_from_tables
from torchmars.planning.plan import plan_run
from torchmars.training.build import build_trainer

PHASE = "forward and backward"


def all_to_alls(traffic):
    """What the rank sends in all-to-alls of the passes."""
    return sum(
        size
        for kind, size in traffic.sent.items()
        if (kind.phase, kind.operation) == (PHASE, "all-to-all")
    )


def counted_and_planned(tables):
    """The all-to-alls of this rank in a step of a run, and in its plan."""
    config, size = config_from_tables(tables, "in a test"), dist.get_world_size()
    trainer = build_trainer(config, connection.start(config.parallelism))
    route_evenly(trainer.model)
    with TrafficCounter() as traffic:
        traffic.begin(PHASE, weight=1)
        trainer.model.backward(trainer.loader.step())
    sent = plan_run(config, size, 0).passes[0]
    [experts] = [each for each in sent if each.operation == "all-to-all"]
    return all_to_alls(traffic), experts.size


def waited_for(*cases):
    """The bytes that layers of this rank wait for in the passes of each model, by operation."""
    found = []
    for name, settings in cases:
        parallelism, training = ParallelismConfig(**settings), training_on(2)
        _, model, batch = model_on(name, parallelism, training, ActivationCheckpointConfig())
        with TrafficCounter() as traffic:
            model.backward(batch)
        found.append(Counter())
        for kind, size in traffic.waited.items():
            found[-1][kind.operation] += size
    return found


@FULL
def test_latents_travel_instead_of_keys_and_of_hidden_states():
    """Each of 2 ranks sends half of what is whole: 8 windows of 24 tokens in float32, 4 blocks."""
    half, width, kept, key, value, heads = 8 * 24 * 4 // 2, 64, 32 + 8, 16 + 8, 12, 8
    models = {"deepseek": 24, "deepseek without latents of queries": width}
    layouts = [{"cp": 2}, {"cp": 2, "cp_method": "ulysses"}, {"tp": 2}]
    for found in run_ranks(waited_for, 2, *product(models, layouts)):
        for (name, layout), sent in zip(product(models, layouts), found):
            if "cp" in layout:
                # Latents in the forward pass, their gradients in the backward pass.
                assert sent["all-gather"] == sent["reduce-scatter"] == 4 * kept * half
                # Of half the tokens, queries and mixed values there and back.
                exchanged = 2 * heads * (key + value) * half // 2
                assert sent["all-to-all"] == ("cp_method" in layout) * 4 * exchanged
            else:
                # What attention and MLP of a block are made from, and what the head is; then the
                # gradients of their outputs, and of the token table's.
                forward = 4 * (models[name] + kept + width) + width
                assert sent["all-gather"] == (forward + 9 * width) * half


CASES = [(2, {}, "none"), (2, {}, "full"), (2, {}, "selective"), (4, {"pp": 2}, "none")]


@pytest.mark.parametrize("ranks,parallelism,mode", full_but([], CASES))
def test_rows_that_travel_to_experts(tmp_path, ranks, parallelism, mode):
    """Tokens x choices x width x (ep - 1) / ep, twice in a pass; and int64 numbers of rows once."""
    blocks, experts, used, width, microbatches, length, ep = 4, 8, 2, 192, 4, 64, 2
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path,
        model=MIXTURE | {"n_layer": blocks},
        parallelism={"ep": ep, **parallelism},
        training={
            "global_batch_size": 2 * microbatches,
            "microbatch_size": 1,
            "seq_len": length,
            "dtype": "float32",
        },
        activation_checkpoint={"mode": mode},
    )
    forward = 2 if mode == "full" else 1
    times = microbatches * blocks // parallelism.get("pp", 1)
    rows = 4 * length * used * width * (ep - 1) / ep
    numbers = 8 * experts * (ep - 1) / ep
    expected = times * (forward * (2 * rows + numbers) + 2 * rows)
    for counted, planned in run_ranks(counted_and_planned, ranks, tables):
        assert counted == planned == expected
