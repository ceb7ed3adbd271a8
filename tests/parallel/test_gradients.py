"""On every layout each weight begins and has the gradient as in one plain model."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.test_gpt2 import ARGS
from tests.models.test_llama import ARGS as LLAMA
from tests.support.ranks import run_ranks
from torchmars.config import ParallelismConfig, TrainingConfig
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama
from torchmars.parallel.layout import Layout
from torchmars.parallel.model import ParallelModel

WINDOWS = torch.randint(64, (8, 25), generator=torch.Generator().manual_seed(0))
MODELS = {
    "gpt2": lambda: GPT2(dataclasses.replace(ARGS, n_layer=4)),
    "llama": lambda: Llama(
        dataclasses.replace(LLAMA, n_layer=4, n_head=8, n_kv_head=4, qk_norm=True, qkv_bias=True)
    ),
}


def plain_gradients(name):
    """Weights and gradients of the mean loss over WINDOWS in one plain model."""
    model = MODELS[name]()
    init_weights(model, seed=0)
    logits = model.head(model(WINDOWS[:, :-1]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), WINDOWS[:, 1:].flatten())
    loss.backward()
    return loss.item(), {
        name: (value.detach(), value.grad) for name, value in model.named_parameters()
    }


def gradients_on(name, parallelism, training):
    """The same of the parts of this rank: the mean loss, and weights and gradients gathered."""
    world = torch.distributed.get_world_size()
    layout = Layout.create(torch.device("cpu"), parallelism.degrees(world))
    with torch.device("meta"):
        whole = MODELS[name]()
    model = ParallelModel(whole, parallelism, training, layout, torch.device("cpu"))
    model.init_weights(seed=0)
    data = layout.data
    size, _ = training.microbatches(data.size, parallelism.stages)
    batch = WINDOWS.chunk(data.size)[data.rank].split(size)
    loss = layout.mean_loss(model.backward(batch))
    return loss, {
        name: (gathered(value), gathered(value.grad)) for name, value in model.weights.items()
    }


def gathered(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


LAYOUTS = {
    "fsdp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2-ulysses": (2, {"cp": 2, "cp_method": "ulysses"}),
    "cp2-fsdp2": (4, {"cp": 2}),
    "tp2-cp2": (4, {"cp": 2, "tp": 2}),
    "tp2-cp2-ulysses": (4, {"cp": 2, "tp": 2, "cp_method": "ulysses"}),
    "pp2": (2, {"pp": 2}),
    "pp2-gpipe": (2, {"pp": 2, "pp_schedule": "GPipe"}),
    "pp2-interleaved": (2, {"pp": 2, "pp_schedule": "Interleaved1F1B"}),
    "pp2-izb": (2, {"pp": 2, "pp_schedule": "InterleavedZeroBubble"}),
    "pp2-zbv": (2, {"pp": 2, "pp_schedule": "ZBVZeroBubble"}),
    "pp2-dualpipev": (2, {"pp": 2, "pp_schedule": "DualPipeV"}),
    "pp2-fsdp2": (4, {"pp": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_rank(name, layout):
    ranks, settings = LAYOUTS[layout]
    training = TrainingConfig(
        global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=8 // ranks // 2 or 1
    )
    expected_loss, expected = plain_gradients(name)
    seen = set()
    for loss, found in run_ranks(
        gradients_on, ranks, name, ParallelismConfig(**settings), training
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, (weight, gradient) in found.items():
            assert torch.equal(weight, expected[name][0]), name
            torch.testing.assert_close(gradient, expected[name][1], rtol=1e-4, atol=1e-6, msg=name)
        seen |= found.keys()
    assert seen == expected.keys()
