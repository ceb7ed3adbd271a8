"""When gradients are reduced and weights are gathered: the gradient is always that of one rank."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (  # private, torch 2.11 to 2.15
    FSDPParamGroup,
)

from tests.support.full import FULL, full_but
from tests.support.gradients import compare, gradients_on, plain_gradients
from tests.support.ranks import run_ranks
from tests.support.traffic import TrafficCounter
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.parallel import fsdp

SLOW = pytest.mark.slow
KEEP_ALL = ActivationCheckpointConfig()


def reductions(*args):
    """How often a rank gathers and reduces in a step, beside the gradients."""
    counter = TrafficCounter()
    result = gradients_on(*args, around=counter)
    times = Counter({"reduce-scatter": 0, "all-reduce": 0})
    for kind, number in counter.times.items():
        times[kind.operation] += number
    return times, result


ACCUMULATED = [("sharded", 2, 1), ("reduced", 2, 2), ("whole", 1, 1)]


@pytest.mark.parametrize("accumulate,scattered,exchanged", full_but(ACCUMULATED[1:2], ACCUMULATED))
def test_hsdp_reduces_as_often_as_it_is_told(accumulate, scattered, exchanged):
    units = 5  # four blocks and the rest
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=1)
    parallelism = ParallelismConfig(dp_replicate=2, accumulate=accumulate)
    kept = ActivationCheckpointConfig()
    _, expected = plain_gradients("gpt2")
    for times, (_, found) in run_ranks(reductions, 4, "gpt2", parallelism, training, kept):
        del times["all-gather"]
        assert times == {"reduce-scatter": scattered * units, "all-reduce": exchanged * units}
        assert found.keys() == expected.keys()
        for name, (_, gradient) in found.items():
            torch.testing.assert_close(gradient, expected[name][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "layout,size,gathered,scattered",
    [({}, 2**20, 1, 1), ({}, 2**10, 9, 5), ({"reshard_after_forward": "never"}, 2**20, 5, 5)],
    ids=str,
)
def test_a_small_model_is_gathered_and_reduced_at_once(layout, size, gathered, scattered):
    """Else each of four blocks is gathered for both passes, and the rest once."""
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=4)
    kept, parallelism = ActivationCheckpointConfig(), ParallelismConfig(**layout)
    results = run_ranks(reductions, 2, "gpt2", parallelism, training, kept, False, size)
    for times, _ in results:
        assert times == {"all-gather": gathered, "reduce-scatter": scattered, "all-reduce": 0}
    compare([found for _, found in results], layout, plain_gradients("gpt2"))


def copies(settings):
    """How often weights of this rank are copied for compute in a step, and the gradients."""
    times = []

    def count(group):
        times.append(len(group.fsdp_params))
        return plain(group)

    plain, FSDPParamGroup._to_unsharded = FSDPParamGroup._to_unsharded, count
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=2)
    found = gradients_on("gpt2", ParallelismConfig(**settings), training, KEEP_ALL)
    FSDPParamGroup._to_unsharded = plain
    return sum(times), found


def copies_of_each(cases):
    """`copies` for each of `cases`, in one process group."""
    return [copies(settings) for settings in cases]


def test_a_rank_with_whole_weights_copies_them_once_a_step():
    """Else for both passes of each of its two microbatches; so it does where it offloads them."""
    replicas = {"dp_replicate": 2}
    cases = [replicas, replicas | {"reshard_after_forward": "always"}]
    cases.append(replicas | {"cpu_offload": True})
    results = run_ranks(copies_of_each, 2, cases)
    for found in results:
        assert [times for times, _ in found] == [27, 2 * 2 * 27, 2 * (2 * 24 + 3)]
    for place, case in enumerate(cases):
        found = [each[place][1] for each in results]
        compare(found, case, plain_gradients("gpt2"))


def test_a_rank_alone_has_fsdp_only_where_it_offloads():
    cases = [{}, {"reshard_after_forward": "always"}, {"cpu_offload": True}]
    (results,) = run_ranks(copies_of_each, 1, cases)
    compare([found for _, found in results], cases, plain_gradients("gpt2"))
    assert [times for times, _ in results] == [0, 0, 4 * (2 * 24 + 3)]


def in_units(cases):
    """`reductions` of each of `cases`, whose blocks are gathered together up to a size."""
    found = []
    for name, bytes_of_unit, parallelism, compiled, mode in cases:
        training = TrainingConfig(
            global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=2, compile=compiled
        )
        config, kept = ParallelismConfig(**parallelism), ActivationCheckpointConfig(mode)
        with mock.patch.dict(fsdp.UNIT_BYTES, cpu=bytes_of_unit):
            found.append(reductions(name, config, training, kept))
    return found


GPT2_BLOCK = 4 * 12 * 32**2  # and some
IN_UNITS = [
    # Of four blocks: three together, one; all; one each.
    (("gpt2", 3.5 * GPT2_BLOCK, {}, False, "none"), 2),
    (("gpt2", 5 * GPT2_BLOCK, {"reshard_after_forward": "always"}, False, "full"), 1),
    (("gpt2", 0.5 * GPT2_BLOCK, {}, False, "selective"), 4),
]
SLOW_UNITS = [
    (("gpt2", 3.5 * GPT2_BLOCK, {}, True, mode), 2) for mode in ("none", "full", "selective")
] + [(("gpt2", 3.5 * GPT2_BLOCK, {"accumulate": "whole"}, False, "full"), 2)]


@pytest.mark.parametrize(
    "cases", [IN_UNITS, pytest.param(SLOW_UNITS, marks=FULL)], ids=["quick", "more"]
)
def test_small_blocks_are_gathered_together(cases):
    """Units are gathered for both passes of two microbatches, and reduced after each."""
    results = run_ranks(in_units, 2, [case for case, _ in cases])
    for place, (case, units) in enumerate(cases):
        _, _, parallelism, _, _ = case
        of_rest = 2 if parallelism.get("reshard_after_forward") == "always" else 1
        reduced = 1 if parallelism.get("accumulate") == "whole" else 2
        for found in results:
            times = found[place][0]
            assert times["all-gather"] == 2 * (2 * units + of_rest), case
            assert times["reduce-scatter"] == reduced * (units + 1), case
        compare([found[place][1] for found in results], case, plain_gradients("gpt2"))
