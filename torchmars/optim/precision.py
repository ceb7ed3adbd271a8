"""What matrices travel in and are multiplied in, and which devices multiply bfloat16 fast."""

import torch

MATRIX_DTYPES = ("auto", "bfloat16", "mixed", "float32")
CPU_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # that multiply bfloat16: x86, x86, ARM


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions that multiply bfloat16 matrices, and torch uses them.

    Without them a CPU takes up to 80 times as long as in float32. A kind of device that is not
    known here has none.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    # Private, torch 2.11 to 2.13. oneDNN may be built without these instructions or be limited by
    # ONEDNN_MAX_CPU_ISA, and on its own it also says yes where it emulates them in AVX-512.
    used = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return used and any(capabilities.get(name, False) for name in CPU_INSTRUCTIONS)


def matrix_dtype_name(value: str | torch.dtype) -> str:
    """A `matrix_dtype` as a string. Raises `ValueError` for one that there is not."""
    name = str(value).removeprefix("torch.")
    known = value.is_floating_point if isinstance(value, torch.dtype) else name in MATRIX_DTYPES
    if not known:
        raise ValueError(f"matrix_dtype must be one of {', '.join(MATRIX_DTYPES)}, got {value}")
    return name


def resolve_matrix_dtype(name: str, fast: bool) -> str:
    """`name`, or for "auto" the dtype for devices that multiply bfloat16 fast, or do not."""
    return name if name != "auto" else "bfloat16" if fast else "mixed"


def wire_and_product(name: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which matrices travel and are multiplied, for a resolved `matrix_dtype`."""
    if name == "mixed":
        return torch.bfloat16, torch.float32
    return getattr(torch, name), getattr(torch, name)
