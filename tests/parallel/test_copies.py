"""A rank alone computes without FSDP, and has to the last bit what FSDP on one shard has."""

from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.support import gradients
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.optim.tensors import local_part
from torchmars.parallel import fsdp, parallel_model
from torchmars.parallel.fsdp import Copies

# Model, training, parallelism, activation checkpointing, whether documents are kept apart.
CASES = [
    ("gpt2", {"dtype": "bfloat16"}, {}, "none", False),
    ("gpt2", {"dtype": "float32"}, {"accumulate": "whole"}, "none", True),
    ("llama", {"dtype": "bfloat16"}, {"accumulate": "whole"}, "full", False),
    ("moe", {"dtype": "bfloat16"}, {"accumulate": "reduced"}, "none", True),
]
MORE = [
    (model, {"dtype": dtype}, {"accumulate": kept}, mode, apart)
    for model, kept, mode, apart in (
        ("gpt2", "sharded", "selective", False),
        ("llama", "reduced", "none", True),
        ("moe", "sharded", "full", False),
        ("glm", "whole", "selective", True),
    )
    for dtype in ("float32", "bfloat16")
]
COMPILED = [
    ("gpt2", {"dtype": "bfloat16", "compile": True}, {}, "none", False),
    ("llama", {"dtype": "float32", "compile": True}, {}, "full", False),
]


def steps_of(case, alone):
    """Losses, gradients and weights of two steps of plain descent; `alone`: as a rank alone is."""
    name, training, parallelism, mode, apart = case
    one_rank = fsdp.is_alone if alone else lambda *_: False
    with mock.patch.object(parallel_model, "is_alone", one_rank):
        _, model, batch = gradients.model_on(
            name,
            ParallelismConfig(**parallelism),
            TrainingConfig(global_batch_size=8, seq_len=24, microbatch_size=2, **training),
            ActivationCheckpointConfig(mode),
            apart,
        )
    assert isinstance(model.parts[0], FSDPModule) != alone
    assert all(type(each) is torch.nn.Parameter for each in model.weights.values()) or not alone
    found = []
    for _ in range(2):
        found.append(model.backward(batch))
        for weight in model.weights.values():
            assert weight.dtype == weight.grad.dtype == torch.float32
            found.append(local_part(weight.grad))
            with torch.no_grad():
                local_part(weight).sub_(0.1 * local_part(weight.grad))
            weight.grad = None
        model.follow_weights()
    return found + [local_part(weight) for weight in model.weights.values()]


def unlike_cases(cases):
    """The cases in which a rank alone has other bits than FSDP on one shard."""
    return [
        case
        for case in cases
        if not all(map(torch.equal, *(steps_of(case, alone) for alone in (False, True))))
    ]


@pytest.mark.parametrize(
    "cases",
    [
        CASES,
        pytest.param(MORE, marks=FULL),
        pytest.param(COMPILED[:1], marks=FULL),
        pytest.param(COMPILED[1:], marks=pytest.mark.slow),
    ],
    ids=["quick", "more", "compiled", "compiled and checkpointed"],
)
def test_bits_are_those_of_fsdp_on_one_shard(cases):
    assert run_ranks(unlike_cases, 1, cases) == [[]]


class Shared(torch.nn.Module):
    """Two modules with one weight, and one that a pass does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_shared_weight_has_one_copy_and_an_unused_one_no_gradient():
    model = Shared()
    weight, unused = model.first.weight, model.unused.weight
    copies = Copies(model, torch.bfloat16)
    copies.follow()
    assert model.first.weight is model.second.weight is not weight
    assert torch.equal(model.first.weight, weight.to(torch.bfloat16))
    x = torch.randn(3, 4).bfloat16()
    parts = []
    for _ in range(3):
        model(x).float().square().sum().backward()
        parts.append(model.first.weight.grad.float())  # that of both uses, added up in bfloat16
        copies.take_gradients()
        assert model.first.weight.grad is None
    assert torch.equal(weight.grad, parts[0] + parts[1] + parts[2]) and unused.grad is None


def graph_cases():
    """How often blocks are compiled, and gradients, of groups of blocks and of each block."""
    found = []
    for most in (1, 2):
        torch._dynamo.reset()
        with mock.patch.dict("torchmars.parallel.graphs.MOST_BLOCKS", cpu=most):
            training = TrainingConfig(
                global_batch_size=8, seq_len=24, dtype="float32", compile=True
            )
            keep_all = ActivationCheckpointConfig()
            frames = torch._dynamo.utils.counters["frames"]
            frames.clear()
            model = gradients.model_on("gpt2", ParallelismConfig(), training, keep_all)[1]
            part = model.parts[0]
            part.compile_loss = False
            x = part.model.embed(gradients.WINDOWS[:, :-1], torch.arange(24))
            part.model.transform(x, torch.arange(24), None).square().sum().backward()
            grads = [each.grad for each in part.model.blocks.parameters()]
            found.append((frames["ok"], grads))
    return found


@FULL
def test_graphs_of_several_blocks_are_compiled_once():
    [[(once, each), (twice, together)]] = run_ranks(graph_cases, 1)
    assert once == twice == 1
    for one, other in zip(each, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
