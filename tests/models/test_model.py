"""What every family of models promises."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models import test_gpt2, test_llama
from torchmars.models import MODELS
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama

SHAPES = [(GPT2, test_gpt2.ARGS)] + [
    (Llama, dataclasses.replace(test_llama.ARGS, **changes))
    for changes in test_llama.VARIANTS.values()
]
NAMES = ["gpt2", *test_llama.VARIANTS]

every_shape = pytest.mark.parametrize("family,args", SHAPES, ids=NAMES)


def test_every_family_is_here():
    assert {family for family, _ in SHAPES} == set(MODELS.values())


@every_shape
def test_flops_per_token_counts_what_runs(family, args):
    model = family(args)
    tokens = torch.randint(64, (2, 24))
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):  # it counts no fused attention on CPU
        model.head(model(tokens)).sum().backward()
    assert model.flops_per_token() * tokens.numel() == counter.get_total_flops()


@every_shape
def test_tensor_parallelism_knows_every_matrix(family, args):
    parameters = family(args).named_parameters()
    named = {name.removesuffix(".weight") for name, value in parameters if value.ndim == 2}
    for name in named:
        assert sum(name.endswith(end) for end in family.cuts) == 1, name
    unused = {end for end in family.cuts if not any(name.endswith(end) for name in named)}
    assert unused <= {"output"}  # the cut of a head that is not tied
