"""When gradients are reduced and weights are gathered: the gradient is always that of one rank."""

from collections import Counter

import pytest
import torch

from tests.parallel.test_gradients import check_gradients, gradients_on, plain_gradients
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.parallel.model import ParallelModel
from torchmars.planning.traffic import TrafficCounter

SLOW = pytest.mark.slow


# Those of the default, "sharded", are in test_gradients.py.
@pytest.mark.parametrize(
    "ranks,layout",
    [
        (2, {"accumulate": "whole"}),
        (4, {"pp": 2, "accumulate": "whole"}),
        pytest.param(
            4, {"pp": 2, "accumulate": "whole", "pp_schedule": "Interleaved1F1B"}, marks=SLOW
        ),
        pytest.param(8, {"pp": 2, "dp_replicate": 2, "accumulate": "sharded"}, marks=SLOW),
        pytest.param(8, {"pp": 2, "dp_replicate": 2, "accumulate": "reduced"}, marks=SLOW),
        pytest.param(8, {"pp": 2, "dp_replicate": 2, "accumulate": "whole"}, marks=SLOW),
    ],
    ids=str,
)
def test_accumulated_gradients_are_those_of_one_rank(ranks, layout):
    check_gradients("gpt2", ranks, layout)


def reductions(*args):
    """How often a rank reduces gradients in a step of two microbatches, beside the gradients."""
    counter, backward = TrafficCounter(), ParallelModel.backward

    def counted(model, batch):
        with counter:
            return backward(model, batch)

    ParallelModel.backward = counted
    result = gradients_on(*args)
    times = Counter({"reduce-scatter": 0, "all-reduce": 0})
    for kind, number in counter.times.items():
        times[kind.operation] += number
    del times["all-gather"]
    return times, result


@pytest.mark.parametrize(
    "accumulate,scattered,exchanged", [("sharded", 2, 1), ("reduced", 2, 2), ("whole", 1, 1)]
)
def test_hsdp_reduces_as_often_as_it_is_told(accumulate, scattered, exchanged):
    units = 5  # four blocks and the rest
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=1)
    parallelism = ParallelismConfig(dp_replicate=2, accumulate=accumulate)
    kept = ActivationCheckpointConfig()
    _, expected = plain_gradients("gpt2")
    for times, (_, found) in run_ranks(reductions, 4, "gpt2", parallelism, training, kept):
        assert times == {"reduce-scatter": scattered * units, "all-reduce": exchanged * units}
        assert found.keys() == expected.keys()
        for name, (_, gradient) in found.items():
            torch.testing.assert_close(gradient, expected[name][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "ranks,layout",
    [
        (4, {"reshard_after_forward": 2}),
        (2, {"reshard_after_forward": "never"}),
        (4, {"pp": 2, "reshard_after_forward": "always"}),
        pytest.param(4, {"cp": 2, "reshard_after_forward": 2}, marks=SLOW),
        pytest.param(8, {"dp_replicate": 2, "reshard_after_forward": 2}, marks=SLOW),
        (2, {"cpu_offload": True}),
        pytest.param(4, {"pp": 2, "cpu_offload": True}, marks=SLOW),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_where_weights_are(ranks, layout):
    check_gradients("gpt2", ranks, layout)


@pytest.mark.parametrize(
    "ranks,layout", [(2, {"reshard_after_forward": "always"}), (4, {"pp": 2})], ids=str
)
def test_a_head_of_its_own(ranks, layout):
    check_gradients("llama", ranks, layout)
