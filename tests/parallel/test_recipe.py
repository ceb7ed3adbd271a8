"""Compute in bfloat16 and compiled blocks: weights stay float32, gradients stay right."""

import pytest
import torch

from tests.parallel.test_gradients import gradients_on, plain_gradients
from tests.support.ranks import run_ranks
from torchmars.config import ParallelismConfig, TrainingConfig


@pytest.mark.parametrize(
    "settings,tolerance", [({"dtype": "bfloat16"}, 3e-2), ({"compile": True}, 1e-5)]
)
def test_gradients_are_those_of_one_rank(settings, tolerance):
    training = TrainingConfig(
        global_batch_size=8, seq_len=24, microbatch_size=2, **({"dtype": "float32"} | settings)
    )
    _, expected = plain_gradients("gpt2")
    for _, found in run_ranks(gradients_on, 2, "gpt2", ParallelismConfig(), training):
        assert found.keys() == expected.keys()
        for name, (weight, gradient) in found.items():
            assert weight.dtype == gradient.dtype == torch.float32
            assert torch.equal(weight, expected[name][0])
            error = (gradient - expected[name][1]).norm() / expected[name][1].norm()
            assert error < tolerance, name
