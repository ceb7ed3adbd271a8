"""How passes are called, and the sums of the first one, also as a GPU makes them."""

import pytest
import torch
from torch import Tensor

from torchmars.optim import passes
from torchmars.optim.passes import CALLS, Calls, calls_of, inner_products


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Let passes take the tensors of a CPU for those of a GPU."""
    monkeypatch.setattr(Tensor, "is_cpu", False)


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
def test_calls_are_few_and_take_each_tensor_once(lengths, of_calls, monkeypatch):
    monkeypatch.setattr(passes, "_compiled", lambda call: "compiled")
    monkeypatch.setitem(CALLS, "cpu", Calls(min_elements=2, max_tensors=16))
    tensors = [torch.ones(length) for length in lengths]
    calls = list(calls_of(len, tensors, compile=True))
    assert [len(tensors[some]) for _, some in calls] == of_calls
    assert [number for _, some in calls for number in range(len(tensors))[some]] == [
        *range(len(tensors))
    ]
    for call, some in calls:
        assert (call == "compiled") == (lengths[some.start] >= 2)
    assert [(call, tensors[some]) for call, some in calls_of(len, tensors, False)] == [
        (len, tensors)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_of_a_gpu_are_those_of_a_cpu(dtype, as_on_gpu):
    generator = torch.Generator().manual_seed(0)
    pairs = [
        tuple(torch.randn(length, generator=generator).to(dtype) for _ in "gh")
        for length in (1, 1023, 1024, 1025, 5000)
    ]
    wanted = [[g @ g, g @ h, h @ h] for g, h in (map(Tensor.double, pair) for pair in pairs)]
    torch.testing.assert_close(inner_products(*zip(*pairs)), torch.tensor(wanted).double())
