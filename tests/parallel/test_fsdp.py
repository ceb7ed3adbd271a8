"""When gradients are reduced and weights are gathered: the gradient is always that of one rank."""

import pytest
import torch

from tests.parallel.test_gradients import MODELS, check_gradients, gradients_on
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models.gpt2 import GPT2
from torchmars.parallel.layout import Layout
from torchmars.parallel.model import ParallelModel
from torchmars.planning.traffic import TrafficCounter


def gpt2_with_head():
    """A model whose head is apart from its token table."""
    model = MODELS["gpt2"]()
    model.output = torch.nn.Linear(model.width, model.vocab_rows, bias=False)
    return model


def gradients_with_head_on(_, *args):
    MODELS["with head"] = gpt2_with_head
    return gradients_on("with head", *args)


@pytest.mark.parametrize("accumulate", ["sharded", "reduced", "whole"])
@pytest.mark.parametrize(
    "ranks,layout",
    [
        pytest.param(2, {}, id="fsdp2"),
        pytest.param(4, {"pp": 2}, id="pp2-fsdp2"),
        pytest.param(4, {"pp": 2, "pp_schedule": "Interleaved1F1B"}, marks=pytest.mark.slow),
        pytest.param(8, {"pp": 2, "dp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_accumulated_gradients_are_those_of_one_rank(ranks, layout, accumulate):
    check_gradients("gpt2", ranks, layout | {"accumulate": accumulate})


def reductions(parallelism, windows):
    """How often a rank reduces gradients in a step of two microbatches, and the gradients."""
    layout = Layout.create(torch.device("cpu"), parallelism.degrees(4))
    with torch.device("meta"):
        whole: GPT2 = MODELS["gpt2"]()
    training = TrainingConfig(seq_len=24, dtype="float32")
    kept = ActivationCheckpointConfig()
    model = ParallelModel(whole, parallelism, training, kept, layout, torch.device("cpu"))
    model.init_weights(seed=0)
    counter = TrafficCounter()
    with counter:
        model.backward(windows[layout.data.rank].split(1))
    times = {"reduce-scatter": 0, "all-reduce": 0}
    for kind, number in counter.times.items():
        if kind.operation in times:
            times[kind.operation] += number
    return times, {name: weight.grad.full_tensor() for name, weight in model.weights.items()}


@pytest.mark.parametrize(
    "accumulate,scattered,exchanged", [("sharded", 2, 1), ("reduced", 2, 2), ("whole", 1, 1)]
)
def test_hsdp_reduces_as_often_as_it_is_told(accumulate, scattered, exchanged):
    units = 5  # four blocks and the rest
    windows = torch.randint(64, (4, 2, 25), generator=torch.Generator().manual_seed(0))
    model = MODELS["gpt2"]()
    expected = run_ranks(
        reductions, 4, ParallelismConfig(dp_replicate=2, accumulate="whole"), windows
    )
    assert set(expected[0][1]) == {name for name, _ in model.named_parameters()}
    parallelism = ParallelismConfig(dp_replicate=2, accumulate=accumulate)
    for times, gradients in run_ranks(reductions, 4, parallelism, windows):
        assert times == {"reduce-scatter": scattered * units, "all-reduce": exchanged * units}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[0][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "ranks,layout",
    [
        (4, {"reshard_after_forward": 2}),
        (2, {"reshard_after_forward": "never"}),
        (4, {"pp": 2, "reshard_after_forward": "always"}),
        pytest.param(4, {"cp": 2, "reshard_after_forward": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"dp_replicate": 2, "reshard_after_forward": 2}, marks=pytest.mark.slow),
        (2, {"cpu_offload": True}),
        pytest.param(4, {"pp": 2, "cpu_offload": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_where_weights_are(ranks, layout):
    check_gradients("gpt2", ranks, layout)


@pytest.mark.parametrize(
    "ranks,layout", [(2, {"reshard_after_forward": "always"}), (4, {"pp": 2})], ids=str
)
def test_a_head_of_its_own(ranks, layout, monkeypatch):
    monkeypatch.setitem(MODELS, "with head", gpt2_with_head)
    check_gradients("with head", ranks, layout, function=gradients_with_head_on)
