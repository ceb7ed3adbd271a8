"""Attention inside documents by the kernel for GPUs, against the mask."""

import pytest
import torch

from tests.gpu.device import DEVICE, without_waiting
from torchmars.models.attention import CausalAttention, Sight, has_kernel
from torchmars.models.documents import document_starts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("first", [0, 128])
def test_documents_apart_are_those_of_the_mask(first, kv_heads):
    """Without waiting for the device. `first`: as one of several ranks that share sequences."""
    torch.manual_seed(0)
    tokens = torch.randint(20, (3, 256))
    starts = document_starts(tokens, end_of_text=0).to(DEVICE)
    shapes = [(3, 4, 256 - first, 64), *[(3, kv_heads, 256, 64)] * 2]
    parts = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    weights = torch.randn_like(parts[0])
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (part.to(dtype, copy=True).requires_grad_() for part in parts)
        with without_waiting():
            sight = Sight.of_documents(starts, 256, q, dropout=0.0)
            mixed = CausalAttention()(q, k, v, sight)
            (mixed * weights).sum().backward()
        found.append([mixed.float(), *(part.grad.float() for part in (q, k, v))])
        assert (sight.mask is None) == has_kernel(DEVICE.type, dtype, 0.0)
    for by_kernel, by_mask in zip(*found):
        assert (by_kernel - by_mask).norm() / by_mask.norm() < 0.02
