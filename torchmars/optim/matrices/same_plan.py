"""Whether all ranks of a mesh planned the same: a step would hang otherwise."""

import hashlib
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist


def on_all_ranks(here: bool, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Return whether it is so `here` and on all other ranks of `groups`. Collective over them."""
    return bool(_least([int(here)], groups, device)[0])


def check_same_plan(
    descriptions: list[str],
    plan: object,
    matrix_dtype: str,
    directions: object,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Raise `RuntimeError`, on all ranks of `groups`, if they planned differently.

    `descriptions` are those of this rank's matrices, in order; `groups` are those of a mesh's
    shards and replicas. Raises `ValueError` likewise where the ranks were given another
    `matrix_dtype`, or other settings of `directions`. Collective over `groups`.
    """
    same = [fingerprint(repr(each)) for each in ((descriptions, plan), matrix_dtype, directions)]
    least = _least([*same, *(-value for value in same)], groups, device)
    plan_agrees, dtype_agrees, directions_agree = (
        low == -high for low, high in zip(least[:3], least[3:])
    )
    if not dtype_agrees:
        raise ValueError("matrix_dtype must be the same on all ranks, they were given several")
    if not directions_agree:
        raise ValueError(
            "orthogonalize and the other options of matrices must be the same on all ranks, they "
            "were given several"
        )
    if not plan_agrees:
        raise RuntimeError(
            "the ranks do not hold the same parameters in the same order: "
            + first_difference(gather_descriptions(descriptions, groups))
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
