"""The devices that are fast in bfloat16, and the dtypes that follow for matrices."""

import pytest
import torch
from torch import nn

from tests.support.tiny import set_bfloat16
from torchmars.optim import MARS
from torchmars.optim.matrices.agreement import multiplies_bfloat16

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "capabilities,onednn,fast",
    [
        ({"avx512_f": True, "avx512_bf16": True}, True, True),  # Zen 4, Cooper Lake
        ({"avx512_bf16": True, "amx_bf16": True}, True, True),  # Sapphire Rapids
        ({"neon": True, "bf16": True}, True, True),  # Graviton 3
        ({"avx2": True, "avx512_f": False}, False, False),  # Zen 3
        ({"avx512_f": True, "avx512_bf16": False}, True, False),  # Cascade Lake: oneDNN emulates it
        ({"neon": True, "bf16": True}, False, False),
    ],
)  # a build that does not use the instructions
def test_a_cpu_is_fast_by_its_capabilities(monkeypatch, capabilities, onednn, fast):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert multiplies_bfloat16(CPU) is fast
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert multiplies_bfloat16(CPU) is False and multiplies_bfloat16(torch.device("meta")) is False


def resolved(matrix_dtype):
    """Return the dtype that one rank makes of `matrix_dtype`."""
    optimizer = MARS([nn.Parameter(torch.ones(4, 6))], rule="mars-m", matrix_dtype=matrix_dtype)
    [traffic] = optimizer.plans.matrices
    return traffic.dtype


def test_auto_follows_the_device(monkeypatch):
    set_bfloat16(False, monkeypatch)
    assert resolved("auto") == torch.float32 and resolved("bfloat16") == torch.bfloat16
    set_bfloat16(True, monkeypatch)
    assert resolved("auto") == torch.bfloat16 and resolved("float32") == torch.float32
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert resolved(dtype) == dtype


@pytest.mark.parametrize("value", ["float16", "half", "mixed", torch.int32, None])
def test_a_matrix_dtype_that_there_is_not_is_named(value):
    with pytest.raises(
        ValueError, match="matrix_dtype must be one of auto, bfloat16, float32, got"
    ):
        MARS([nn.Parameter(torch.ones(4, 4))], rule="mars-m", matrix_dtype=value)
