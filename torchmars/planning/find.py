"""Layouts for a number of GPUs, planned all, and a table of the fastest that fit."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.planning.plan import RESERVED, SPEEDS, Plan, check_machines, costs_of
from torchmars.records.gpus import GIB

SHOWN = 8  # layouts of the table
SHORTEST = 1024  # tokens of a sequence on a rank, below which kernels are slow
# The options that are tried, besides the config's own.
TRIED = {
    "parallelism": "dp_replicate dp_shard tp cp ep pp pp_schedule accumulate".split(),
    "training": ["microbatch_size"],
    "activation_checkpoint": ["mode"],
}
MODES = ("none", "selective", "full")
HEADINGS = f"{'s/step':>8}  {'GiB':>5}  {'waiting':>7}  {'microbatches':>12}  options"


def find_layouts(
    config: ResolvedConfig, world_size: int, per_node: int, memory: float
) -> list[str]:
    """Return a table of the fastest layouts for GPUs with `memory` bytes each.

    Of those that differ only in how weights and gradients travel it has one. Raises `UserError` if
    none fits.
    """
    if not per_node:
        raise UserError("--find is for GPUs: set --gpus-per-node, the GPUs of each machine")
    check_machines(world_size, per_node)
    plans = list(planned(config, world_size, per_node))
    if not plans:
        raise UserError(
            f"no layout divides --world-size {world_size} with training.global_batch_size = "
            f"{config.training.global_batch_size} and training.seq_len = {config.training.seq_len}:"
            " change one of them"
        )
    best = dict[object, Plan]()
    for plan in plans:
        if plan.largest.peak < memory - RESERVED:
            _, _, _, cp, tp, ep = plan.degrees
            key = plan.degrees.pp, cp, tp, ep, plan.memory.mode
            best[key] = min(best.get(key, plan), plan, key=order)
    if not best:
        least = min(plan.largest.peak for plan in plans) + RESERVED
        raise UserError(
            f"no layout of --world-size {world_size} fits --memory {memory / GIB:.0f} GiB, of "
            f"which about {RESERVED // GIB} are not free; the smallest needs about "
            f"{least / GIB:.0f} GiB: take more or larger GPUs, or lower training.seq_len"
        )
    lines = [HEADINGS]
    fastest = sorted(sorted(best.values(), key=order)[:SHOWN], key=seconds)
    for plan in fastest:
        figures = f"{seconds(plan):8.2f}  {plan.largest.peak / GIB:5.0f}  {plan.bubble:7.0%}"
        lines.append(f"{figures}  {plan.microbatches[1]:12}  {layout_options(plan.config, config)}")
    named = layout_options(fastest[0].config, config) or "the config as it is"
    found = f"the fastest of {len(plans)} layouts that divide, for {SPEEDS}"
    return [*lines, f"the fastest that fits: {named}", found]


def order(plan: Plan) -> tuple[float, int]:
    """Return the time of a plan's passes, and its peak."""
    return plan.time_of_passes, plan.largest.peak


def seconds(plan: Plan) -> float:
    """Return the time of a step on GPUs."""
    assert plan.seconds is not None
    return plan.seconds


def planned(config: ResolvedConfig, world_size: int, per_node: int) -> Iterator[Plan]:
    """Yield the plan of every layout that divides; tp and ep stay within machines."""
    costs, config, _ = costs_of(config, per_node)
    inside, longest = min(per_node, world_size), max(1, config.training.seq_len // SHORTEST)
    experts = math.gcd(inside, costs.model.experts) if costs.model.experts else 1
    sizes = sorted({1, 2, 4, config.training.microbatch_size or 1})
    sizes_of_axes = divisors(inside), divisors(world_size), divisors(world_size), divisors(experts)
    for tp, pp, cp, ep in product(*sizes_of_axes):
        copies = world_size // (tp * pp * cp)
        if world_size % (tp * pp * cp) or cp > longest or pp > costs.model.n_layer:
            continue
        replicas = sorted({1, math.gcd(copies, max(1, world_size // per_node))})
        schedules = ("1F1B", "Interleaved1F1B")[: 1 + (pp > 1)]
        forms = product(replicas, schedules, ("sharded", "whole"), sizes, MODES)
        for dp_replicate, schedule, accumulate, size, mode in forms:
            axes: list[Any] = [dp_replicate, -1, tp, cp, ep, pp, schedule, accumulate]
            layout: Any = config
            for (section, names), values in zip(TRIED.items(), (axes, [size], [mode])):
                changed: Any = replace(getattr(layout, section), **dict(zip(names, values)))
                layout = replace(layout, **{section: changed})
            with suppress(UserError):
                plan = Plan(costs, layout, world_size, per_node)
                if accumulate == "sharded" or plan.microbatches[1] > 1:
                    yield plan


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`."""
    return [each for each in range(1, number + 1) if number % each == 0]


def layout_options(layout: ResolvedConfig, config: ResolvedConfig) -> str:
    """Return the options that make `layout` of `config`."""
    pairs = [
        (f"--{section}.{name}", getattr(getattr(layout, section), name))
        for section, names in TRIED.items()
        for name in names
        if getattr(getattr(layout, section), name) != getattr(getattr(config, section), name)
    ]
    return " ".join(f"{name} {value}" for name, value in pairs)
