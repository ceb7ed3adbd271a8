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
    states: list = [[{} for _ in group] for group in lasts]
    for number, step in enumerate(steps):
        step = clipped_whole(step, max_grad_norm)
        if look_ahead is not None and number:
            lasts = clipped_whole(look_ahead[number], max_grad_norm)[0]
        used, norm = step
        sums: dict[str, dict[str, float]] = {}
        for group, gs, hs, memories in zip(groups, used, lasts, states):
            of_role = sums.setdefault(group["role"], dict.fromkeys(SUMS, 0.0))
            for g, h, memory in zip(gs, hs, memories):
                add_tensor(of_role, group, g, h, memory)
        lasts = used
    numbers = {"grad_norm": norm, "skipped_steps": 0.0, "skipped_in_a_row": 0.0}
    scale = global_scale(norm, max_grad_norm)
    for role, of in sums.items():
        numbers[f"{role}/grad_norm"] = math.sqrt(of["gg"]) / scale
        numbers[f"{role}/momentum"] = math.sqrt(of["memory"] / of["gg"])
        if of["tensors"]:
            numbers[f"{role}/clipped"] = of["clipped"] / of["tensors"]
            numbers[f"{role}/correction"] = math.sqrt(of["correction"] / of["gg"])
            sizes = math.sqrt(of["gg"] * of["hh"])
            numbers[f"{role}/cosine"] = of["gh"] / sizes if sizes else 0.0
    return numbers


SUMS = ("gg", "gh", "hh", "memory", "correction", "clipped", "tensors")


def global_scale(norm: float, max_grad_norm: float | None) -> float:
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))


def clipped_whole(step, max_grad_norm):
    """Return a step's gradients after the global clip, in float64, and their norm before it."""
    wide = [[g.double() for g in group] for group in step]
    norm = math.sqrt(sum(float(g.pow(2).sum()) for group in wide for g in group))
    scale = global_scale(norm, max_grad_norm)
    return [[g * scale for g in group] for group in wide], norm


def add_tensor(sums, group, g, h, memory):
    """Update the `memory` of a tensor by its gradient g, and add what it tells to `sums`."""
    rule, (b1, b2) = group["rule"], group["betas"]
    zeros = torch.zeros_like(g)
    c, lean = g, False
    if rule.startswith("mars"):
        gamma, clip = group["gamma"], group["clip"]
        if h is not None and g.ndim == 3:  # experts, of which some got no token
            h = torch.where(g == 0, 0, h)
        lean = clip is None and rule != "mars-adamw" and not group.get("exact")
        correction = gamma * b1 / (1 - b1) * (g - (g if h is None else h))
        c = g + correction
        if not lean:
            norm = float(c.norm())
            sums["tensors"] += 1
            sums["correction"] += float(correction.pow(2).sum())
            sums["gh"] += 0.0 if h is None else float((g * h).sum())
            sums["hh"] += 0.0 if h is None else float(h.pow(2).sum())
            if clip is not None and norm > clip:
                sums["clipped"] += 1
                c = c * (clip / norm)
    if rule in ("adamw", "mars-adamw"):
        memory["v"] = b2 * memory.get("v", zeros) + (1 - b2) * c**2
        size = float(memory["v"].sum())
    else:
        if lean:  # what the state has of the momentum m: u = m - gamma g
            before = memory.get("m", -gamma * g)
            memory["m"] = b1 * before + (1 - b1) * (1 - gamma) * g
        elif rule == "muon":  # Nesterov's buffer, as an average
            memory["m"] = b1 * memory.get("m", zeros) + (1 - b1) * g
        else:
            decay = b2 if rule == "lion" else b1
            memory["m"] = decay * memory.get("m", zeros) + (1 - decay) * c
        size = float(memory["m"].pow(2).sum())
    sums["memory"] += size
    sums["gg"] += float(g.pow(2).sum())
