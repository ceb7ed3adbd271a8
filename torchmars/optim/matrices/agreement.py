"""What all ranks of a mesh must agree on before a step: the dtype of matrices, and the plan."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

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


def agreed_dtype(
    name: str, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> torch.dtype:
    """Return the dtype that matrices travel and are multiplied in: the same on all ranks.

    `name` is that of `matrix_dtype_name`. Collective over `groups`, of shards and of replicas.
    """
    native = bool(_least([int(multiplies_bfloat16(device))], groups, device)[0])
    return getattr(torch, resolve_matrix_dtype(name, native))


def check_same_plan(
    plan: object, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Raise `RuntimeError`, on all ranks of `groups`, if their plans differ: a step would hang.

    `plan` is all that decides what this rank sends and computes, and has a `repr` that says it;
    `groups` are those of a mesh's shards and replicas. Collective over them.
    """
    here = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "big")
    low, high = _least([here, -here], groups, device)
    if low != -high:
        raise RuntimeError(
            "the ranks must have the same matrix parameters in the same order, with the same "
            "settings and the same version of torchmars: their plans differ"
        )


def _least(
    values: list[int], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[int]:
    """Return the least of each value on the ranks of `groups`: of shards, then of replicas.

    All ranks of the mesh know it then, and none waits for others.
    """
    if not groups:
        return values
    least = torch.tensor(values, device=device)
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return least.tolist()
