"""Whether all ranks of a mesh planned the same: a step would hang otherwise."""

import hashlib
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist


def check_same_plan(
    descriptions: list[str],
    plan: object,
    matrix_dtype: str,
    native_bfloat16: bool,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> bool:
    """Return whether all ranks of `groups` have `native_bfloat16`.

    `descriptions` are those of this rank's matrices, in order; `groups` are those of a mesh's
    shards and replicas. Raises `RuntimeError`, on all ranks, if they planned differently, and
    `ValueError` likewise where they were given another `matrix_dtype`. Collective over `groups`.
    """
    if not groups:
        return native_bfloat16
    same = [fingerprint(repr((descriptions, plan))), fingerprint(matrix_dtype)]
    values = torch.tensor([*same, *(-value for value in same), native_bfloat16], device=device)
    for group in groups:  # of shards, then of replicas: all ranks of the mesh know, none waits
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    plan_low, dtype_low, plan_high, dtype_high, everywhere = values.tolist()
    if plan_low != -plan_high:
        raise RuntimeError(
            "the ranks do not hold the same parameters in the same order: "
            + first_difference(gather_descriptions(descriptions, groups))
        )
    if dtype_low != -dtype_high:
        raise ValueError("matrix_dtype must be the same on all ranks, they were given several")
    return bool(everywhere)


def fingerprint(text: str) -> int:
    """Return a number of 56 bits that other texts do not have."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def gather_descriptions(
    descriptions: list[str], groups: Sequence[dist.ProcessGroup]
) -> dict[int, list[str]]:
    """Return the descriptions of every rank of a mesh, by rank."""
    gathered = {dist.get_rank(): descriptions}
    for group in groups:
        everyone: list[dict[int, list[str]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyone, gathered, group=group)
        gathered = {rank: theirs for each in everyone for rank, theirs in each.items()}
    return gathered


def first_difference(descriptions: dict[int, list[str]]) -> str:
    """Return where the matrix parameters of two ranks first differ."""
    first, *others = sorted(descriptions)
    for other in others:
        pairs = itertools.zip_longest(descriptions[first], descriptions[other], fillvalue="missing")
        for number, (here, there) in enumerate(pairs):
            if here != there:
                return (
                    f"matrix parameter number {number} of their mesh is {here} on rank {first} "
                    f"and {there} on rank {other}"
                )
    return "their plans differ all the same: install the same version on all machines"
