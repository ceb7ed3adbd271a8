"""The numbers of telemetry in float64, from whole gradients.

They are written from the update rules, and not from the code under test.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def numbers_apart(
    groups: Sequence[Mapping[str, Any]],
    steps: Iterable[Sequence[Sequence[Tensor]]],
    max_grad_norm: float | None,
    look_ahead: Sequence[Sequence[Sequence[Tensor]]] | None = None,
) -> dict[str, float]:
    """Return what telemetry is to say after `steps`: gradients [step][group][tensor].

    `groups` have role, rule, betas, gamma and clip. `look_ahead`, in exact mode, are the gradients
    at the weights before.
    """
    lasts: list = [[None] * len(group) for group in next(iter(steps))]
    for number, step in enumerate(steps):
        step = clipped_whole(step, max_grad_norm)
        if look_ahead is not None and number:
            lasts = clipped_whole(look_ahead[number], max_grad_norm)[0]
        used, norm = step
        sums: dict[str, dict[str, float]] = {}
        for group, gs, hs in zip(groups, used, lasts):
            of_role = sums.setdefault(group["role"], dict.fromkeys(SUMS, 0.0))
            for g, h in zip(gs, hs):
                add_tensor(of_role, group, g, h)
        lasts = used
    numbers = {"grad_norm": norm, "skipped_steps": 0.0, "skipped_in_a_row": 0.0}
    scale = global_scale(norm, max_grad_norm)
    for role, of in sums.items():
        numbers[f"{role}/grad_norm"] = math.sqrt(of["gg"]) / scale
        if of["tensors"]:
            numbers[f"{role}/clipped"] = of["clipped"] / of["tensors"]
            numbers[f"{role}/correction"] = math.sqrt(of["correction"] / of["gg"])
            sizes = math.sqrt(of["gg"] * of["hh"])
            numbers[f"{role}/cosine"] = of["gh"] / sizes if sizes else 0.0
    return numbers


SUMS = ("gg", "gh", "hh", "correction", "clipped", "tensors")


def global_scale(norm: float, max_grad_norm: float | None) -> float:
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))


def clipped_whole(step, max_grad_norm):
    """Return a step's gradients after the global clip, in float64, and their norm before it."""
    wide = [[g.double() for g in group] for group in step]
    norm = math.sqrt(sum(float(g.pow(2).sum()) for group in wide for g in group))
    scale = global_scale(norm, max_grad_norm)
    return [[g * scale for g in group] for group in wide], norm


def add_tensor(sums, group, g, h):
    """Add what a tensor's gradient g and last gradient h tell to `sums`."""
    rule, (b1, _) = group["rule"], group["betas"]
    sums["gg"] += float(g.pow(2).sum())
    if not rule.startswith("mars"):
        return
    gamma, clip = group["gamma"], group["clip"]
    if clip is None and rule != "mars-adamw" and not group.get("exact"):  # no last gradient is kept
        return
    if h is not None and g.ndim == 3:  # experts, of which some got no token
        h = torch.where(g == 0, 0, h)
    correction = gamma * b1 / (1 - b1) * (g - (g if h is None else h))
    sums["tensors"] += 1
    sums["correction"] += float(correction.pow(2).sum())
    sums["gh"] += 0.0 if h is None else float((g * h).sum())
    sums["hh"] += 0.0 if h is None else float(h.pow(2).sum())
    if clip is not None and float((g + correction).norm()) > clip:
        sums["clipped"] += 1
