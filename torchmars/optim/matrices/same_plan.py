"""What all ranks of a mesh must agree on: a step would hang otherwise."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


def on_all_ranks(here: bool, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Return whether it is so `here` and on all other ranks of `groups`. Collective over them."""
    return bool(_least([int(here)], groups, device)[0])


def check_same_plan(
    plan: object, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Raise `RuntimeError`, on all ranks of `groups`, if their plans differ.

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
