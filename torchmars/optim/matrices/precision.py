"""The dtype that matrices travel and are multiplied in; the devices that are fast in bfloat16."""

import torch

MATRIX_DTYPES = ("auto", "bfloat16", "float32")
# Names of instructions that multiply bfloat16, of torch.cpu.get_capabilities: x86, x86, ARM.
CPU_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether `device` has instructions that multiply bfloat16, and torch uses them.

    Without them a CPU takes up to 80 times as long as in float32. Of devices other than GPUs and
    CPUs the answer is no.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    # Private, torch 2.11 to 2.15. oneDNN may be built without these instructions or be limited by
    # ONEDNN_MAX_CPU_ISA, and on its own it also says yes where it emulates them in AVX-512.
    used = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return used and any(capabilities.get(name, False) for name in CPU_INSTRUCTIONS)


def matrix_dtype_name(value: str | torch.dtype) -> str:
    """Return a `matrix_dtype` as a string. Raises `ValueError` for an unknown one."""
    name = str(value).removeprefix("torch.")
    known = value.is_floating_point if isinstance(value, torch.dtype) else name in MATRIX_DTYPES
    if not known:
        raise ValueError(f"matrix_dtype must be one of {', '.join(MATRIX_DTYPES)}, got {value}")
    return name


def resolve_matrix_dtype(name: str, native_bfloat16: bool) -> str:
    """Return `name`, or for "auto" the choice by whether devices have native bfloat16."""
    return name if name != "auto" else "bfloat16" if native_bfloat16 else "float32"
