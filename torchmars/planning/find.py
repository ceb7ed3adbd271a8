"""Layouts for a number of GPUs, planned all, and a table of the fastest that fit."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

from torchmars.config import ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.planning.memory import ModelCosts
from torchmars.planning.plan import RESERVED, SPEEDS, Plan
from torchmars.records.gpus import GIB

SHOWN = 8  # layouts of the table
SHORTEST = 1024  # tokens of a sequence on a rank, below which kernels are slow
# The options that are tried, besides the config's own.
TRIED = {
    "parallelism": "dp_replicate dp_shard tp cp ep pp pp_schedule accumulate".split(),
    "training": ["microbatch_size"],
    "activation_checkpoint": ["mode"],
}
FORM = attrgetter("degrees.pp", "degrees.cp", "degrees.tp", "degrees.ep", "mode")
ORDER = attrgetter("time_of_passes", "largest.peak")
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
    best, peaks = dict[object, Plan](), []
    for plan in planned(config, world_size, per_node):
        peaks.append(plan.largest.peak)
        if peaks[-1] < memory - RESERVED:
            best[FORM(plan)] = min(best.get(FORM(plan), plan), plan, key=ORDER)
    if not peaks:
        raise UserError(
            f"no layout divides --world-size {world_size} with training.global_batch_size = "
            f"{config.training.global_batch_size} and training.seq_len = {config.training.seq_len}:"
            " change one of them"
        )
    if not best:
        raise UserError(
            f"no layout of --world-size {world_size} fits --memory {memory / GIB:.0f} GiB, of "
            f"which about {RESERVED // GIB} are not free; the smallest needs about "
            f"{(min(peaks) + RESERVED) / GIB:.0f} GiB: take more or larger GPUs, or lower "
            "training.seq_len"
        )
    lines = [HEADINGS]
    fastest = sorted(best.values(), key=ORDER)[:SHOWN]
    fastest.sort(key=lambda plan: plan.seconds or 0.0)  # with the optimizer, which takes longer
    for plan in fastest:
        figures = f"{plan.seconds:8.2f}  {plan.largest.peak / GIB:5.0f}  {plan.bubble:7.0%}"
        lines.append(f"{figures}  {plan.microbatches[1]:12}  {layout_options(plan.config, config)}")
    named = layout_options(fastest[0].config, config) or "the config as it is"
    lines.append(f"the fastest that fits: {named}")
    return [*lines, f"the fastest of {len(peaks)} layouts that divide, for {SPEEDS}"]


def planned(config: ResolvedConfig, world_size: int, per_node: int) -> Iterator[Plan]:
    """Yield the plan of every layout that divides; tp and ep stay within machines."""
    costs = ModelCosts(config, per_node)
    inside, longest = min(per_node, world_size), max(1, config.training.seq_len // SHORTEST)
    experts = math.gcd(inside, costs.model.experts or 1)
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
            axes: Any = [dp_replicate, -1, tp, cp, ep, pp, schedule, accumulate]
            layout: Any = costs.config
            for (section, names), values in zip(TRIED.items(), (axes, [size], [mode])):
                changed: Any = replace(getattr(layout, section), **dict(zip(names, values)))
                layout = replace(layout, **{section: changed})
            with suppress(UserError):
                plan = Plan(costs, layout, world_size)
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
