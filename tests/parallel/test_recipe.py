"""Compute in bfloat16 and compiled blocks: weights stay float32, gradients stay right."""

import pytest
import torch

from tests.support.full import FULL
from tests.support.gradients import gradients_on, plain_gradients
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig


@pytest.mark.parametrize(
    "settings,tolerance",
    [({"dtype": "bfloat16"}, 3e-2), pytest.param({"compile": True}, 1e-5, marks=FULL)],
)
def test_gradients_are_those_of_one_rank(settings, tolerance):
    training = TrainingConfig(
        global_batch_size=8, seq_len=24, microbatch_size=2, **({"dtype": "float32"} | settings)
    )
    kept = ActivationCheckpointConfig()
    _, expected = plain_gradients("gpt2")
    for _, found in run_ranks(gradients_on, 2, "gpt2", ParallelismConfig(), training, kept):
        assert found.keys() == expected.keys()
        for name, (weight, gradient) in found.items():
            assert weight.dtype == gradient.dtype == torch.float32
            assert torch.equal(weight, expected[name][0])
            error = (gradient - expected[name][1]).norm() / expected[name][1].norm()
            assert error < tolerance, name
