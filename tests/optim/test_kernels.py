"""How kernels are called, and the sums of the first pass, also as a GPU makes them."""

import pytest
import torch
from torch import Tensor

from torchmars.optim import kernels
from torchmars.optim.kernels import CALLS, Calls, inner_products, run_kernel
from torchmars.optim.rules.factors import factors_of_each


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Let kernels take the tensors of a CPU for those of a GPU."""
    monkeypatch.setattr(Tensor, "is_cpu", False)


def scale_(tensors, factors):
    """A kernel that multiplies each (x,) by two factors, and returns how many there were."""
    for (x,), (own, shared) in zip(tensors, factors_of_each(factors, len(tensors))):
        x.mul_(own * shared)
    return torch.tensor([len(tensors)])


@pytest.mark.parametrize(
    "lengths,of_calls",
    [
        ([9] * 12, [12]),
        ([9] * 25, [13, 12]),
        ([9] * 64, [16, 16, 16, 16]),
        ([9] * 3 + [8] * 2 + [9], [3, 2, 1]),
        ([1, 0, 1, 9], [3, 1]),  # the short ones are not compiled
    ],
)
def test_calls_are_few_and_each_tensor_gets_its_factors(lengths, of_calls, monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", lambda kernel: kernel)
    monkeypatch.setitem(CALLS, "cpu", Calls(min_elements=2, max_tensors=16))
    tensors = [torch.ones(length) for length in lengths]
    own, shared = torch.arange(float(len(lengths))), torch.tensor(2.0)
    counts = run_kernel(scale_, [(each,) for each in tensors], (own, shared), compile=True)
    assert torch.cat(counts).tolist() == of_calls
    for number, tensor in enumerate(tensors):
        assert (tensor == 2.0 * number).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_of_a_gpu_are_those_of_a_cpu(dtype, as_on_gpu):
    generator = torch.Generator().manual_seed(0)
    pairs = [
        tuple(torch.randn(length, generator=generator).to(dtype) for _ in "gh")
        for length in (1, 1023, 1024, 1025, 5000)
    ]
    wanted = [[g @ g, g @ h, h @ h] for g, h in (map(Tensor.double, pair) for pair in pairs)]
    torch.testing.assert_close(inner_products(pairs, None), torch.tensor(wanted).double())
