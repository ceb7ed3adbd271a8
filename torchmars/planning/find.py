"""Layouts for a number of GPUs: a rule of thumb proposes a few, and each is planned exactly."""

import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

from torchmars.cluster.callers import found_as_here
from torchmars.config import ActivationCheckpointConfig, ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.config.parallelism import Accumulation, PipelineSchedule
from torchmars.config.plugins import load_plugins
from torchmars.config.toml_files import Tables
from torchmars.core.cores import own_cores
from torchmars.core.errors import UserError
from torchmars.models import Model
from torchmars.parallel.checks import check_layout, check_memory
from torchmars.planning.assumptions import RESERVED, SPEEDS
from torchmars.planning.plan import plan_rank
from torchmars.planning.thumb import RuleOfThumb, rule_of_thumb
from torchmars.records.gpus import GIB

PLANNED = 8  # layouts at most
CAREFUL = 2  # of these, that fit even if the rule of thumb is off by `OFF`
OFF = 1.25
SHORTEST = 1024  # tokens of a sequence on a rank, below which kernels are slow
# The options that are tried, besides the config's own.
TRIED = {
    "parallelism": (
        *("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "pp_schedule", "pp_blocks"),
        "accumulate",
    ),
    "training": ("microbatch_size",),
    "activation_checkpoint": ("mode",),
}
SCHEDULES: tuple[PipelineSchedule, ...] = ("1F1B", "Interleaved1F1B")
HEADINGS = f"{'s/step':>8}  {'GiB':>5}  {'waiting':>7}  {'microbatches':>12}  options"


class Found(NamedTuple):
    """The figures of a layout's exact plan."""

    seconds: float
    peak: int
    bubble: float
    microbatches: int


def find_layouts(
    config: ResolvedConfig, world_size: int, per_node: int, memory: float
) -> Iterator[str]:
    """Yield a table of layouts for GPUs with `memory` bytes each, a row as soon as it is planned.

    Raises `UserError` if none fits.
    """
    if not per_node:
        raise UserError("--find is for GPUs: set --gpus-per-node, the GPUs of each machine")
    rule = rule_of_thumb(config, world_size, per_node)
    dividing = list(layouts(config, rule))
    if not dividing:
        raise UserError(
            f"no layout divides --world-size {world_size} with training.global_batch_size = "
            f"{config.training.global_batch_size} and training.seq_len = {config.training.seq_len}:"
            " change one of them"
        )
    proposed = propose(dividing, rule, memory - RESERVED)
    if proposed:
        yield HEADINGS
    fitting = []
    found = plan_all(proposed, world_size, per_node, config.run.plugins)
    for layout, plan in zip(proposed, found):
        options = layout_options(layout, config)
        if isinstance(plan, UserError):  # what the rule does not know
            yield f"{'-':>8}  {'-':>5}  {'-':>7}  {'-':>12}  {options}  # {plan}"
            continue
        if fits := plan.peak < memory - RESERVED:
            fitting.append((plan.seconds, options))
        notes = why_whole(layout, rule) if fits else ["does not fit"]
        figures = f"{plan.seconds:8.2f}  {plan.peak / GIB:5.0f}  {plan.bubble:7.0%}"
        yield f"{figures}  {plan.microbatches:12}  {options}" + "".join(f"  # {n}" for n in notes)
    if not fitting:
        least = min(map(rule.memory, dividing)) + RESERVED
        raise UserError(
            f"no layout of --world-size {world_size} fits --memory {memory / GIB:.0f} GiB, of "
            f"which about {RESERVED // GIB} are not free; the smallest needs about "
            f"{least / GIB:.0f} GiB by a rule of thumb: take more or larger GPUs, or lower "
            "training.seq_len"
        )
    yield f"the fastest that fits: {min(fitting)[1] or 'the config as it is'}"
    yield f"plans of {len(proposed)} layouts that a rule of thumb proposes, for {SPEEDS}"


def propose(layouts: list[ResolvedConfig], rule: RuleOfThumb, free: float) -> list[ResolvedConfig]:
    """Return the few of `layouts` to plan, for `free` bytes of memory: the fastest by the rule.

    Of those that differ only in how often weights and gradients travel, it is the fastest one.
    """
    best = dict[tuple[object, ...], tuple[float, float, ResolvedConfig]]()
    for each in layouts:
        if (needed := rule.memory(each)) < free:
            parallelism, mode = each.parallelism, each.activation_checkpoint.mode
            degrees = parallelism.tp, parallelism.cp, parallelism.pp, parallelism.ep
            figures = rule.seconds(each), needed, each
            key = (*degrees, mode, needed * OFF < free)
            best[key] = min(best.get(key, figures), figures, key=lambda figures: figures[:2])
    order = sorted(best.values(), key=lambda figures: figures[:2])
    fastest, rest = order[: PLANNED - CAREFUL], order[PLANNED - CAREFUL :]
    careful = [figures for figures in rest if figures[1] * OFF < free][:CAREFUL]
    return [config for _, _, config in fastest + careful]


def layouts(config: ResolvedConfig, rule: RuleOfThumb) -> Iterator[ResolvedConfig]:
    """Yield the config with every layout that divides; tp and ep stay within machines."""
    model, world_size = rule.model, rule.world_size
    inside = min(rule.per_node, world_size)
    longest = max(1, config.training.seq_len // SHORTEST)
    sizes = sorted({1, 2, 4, config.training.microbatch_size or 1})
    for tp, pp in product(divisors(inside), divisors(world_size)):
        for cp in divisors(world_size // tp // pp) if world_size % (tp * pp) == 0 else ():
            copies = world_size // (tp * pp * cp)
            machines = {1, math.gcd(copies, max(1, world_size // rule.per_node))}
            schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
            if cp > longest or pp > len(model.blocks):
                continue
            forms = product(schedules, sizes, sorted(machines), expert_degrees(model, inside))
            for schedule, size, dp_replicate, ep in forms:
                parallelism = replace(
                    config.parallelism,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    dp_replicate=dp_replicate,
                    dp_shard=-1,
                    pp_blocks=None,
                    pp_schedule=schedule,
                    accumulate="sharded",
                )
                training = replace(config.training, microbatch_size=size)
                layout = replace(config, parallelism=parallelism, training=training)
                yield from in_memory(layout, rule)


def in_memory(layout: ResolvedConfig, rule: RuleOfThumb) -> Iterator[ResolvedConfig]:
    """Yield a layout with every way to use the memory; nothing if it does not divide."""
    modes: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    forms: tuple[Accumulation, ...] = ("sharded", "whole")
    layout = replace(layout, activation_checkpoint=ActivationCheckpointConfig())
    try:
        degrees = layout.parallelism.degrees(rule.world_size)
        _, microbatches = rule.batch(layout)
        check_layout(layout, degrees, rule.model)
    except UserError:
        return
    for mode, accumulate in product(modes, forms if microbatches > 1 else forms[:1]):
        form = replace(
            layout,
            parallelism=replace(layout.parallelism, accumulate=accumulate),
            activation_checkpoint=ActivationCheckpointConfig(mode),
        )
        with suppress(UserError):  # the rest of `check_layout` is the same for all forms
            check_memory(form, degrees)
            yield form


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`."""
    return [each for each in range(1, number + 1) if number % each == 0]


def expert_degrees(model: Model, ranks: int) -> list[int]:
    """Return over how many of `ranks` the experts of `model` can be dealt out evenly."""
    return divisors(math.gcd(ranks, model.experts)) if model.experts else [1]


def layout_options(layout: ResolvedConfig, config: ResolvedConfig) -> str:
    """Return the options that make `layout` of `config`."""
    pairs = [
        (f"--{section}.{name}", getattr(getattr(layout, section), name))
        for section, names in TRIED.items()
        for name in names
        if getattr(getattr(layout, section), name) != getattr(getattr(config, section), name)
    ]
    return " ".join(f"{name} {value}" for name, value in pairs)


def why_whole(layout: ResolvedConfig, rule: RuleOfThumb) -> list[str]:
    """Return why ranks have all experts in a layout, by the rule; nothing if they do not."""
    if layout.parallelism.ep > 1 or not rule.model.experts:
        return []
    for ep in expert_degrees(rule.model, min(rule.per_node, rule.world_size))[1:]:
        dealt = replace(layout, parallelism=replace(layout.parallelism, ep=ep))
        with suppress(UserError):
            check_layout(dealt, dealt.parallelism.degrees(rule.world_size), rule.model)
            more = rule.seconds(dealt) - rule.seconds(layout)
            return [f"ep 1: experts fit whole; ep {ep} would change a step by about {more:+.2f} s"]
    return ["ep 1: nothing else divides the ranks of a stage and the experts"]


def plan_all(
    layouts: list[ResolvedConfig], world_size: int, per_node: int, plugins: list[str]
) -> Iterator[Found | UserError]:
    """Plan each of `layouts`, in order, in processes: a plan leaves its process group behind."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torchmars.planning.plan"])  # once, for all of them
    workers = max(1, min(len(layouts), own_cores() // 2))
    os.environ.update(found_as_here(os.environ))  # for the server, which starts with the first
    work = partial(planned, world_size=world_size, per_node=per_node)
    with ProcessPoolExecutor(
        workers, server, load_plugins, (plugins,), max_tasks_per_child=1
    ) as pool:
        # As tables: the class of a section with a plugin's settings cannot be pickled.
        yield from pool.map(work, map(asdict, layouts))


def planned(layout: Tables, world_size: int, per_node: int) -> Found | UserError:
    """Return the figures of the exact plan of a layout's config, or why there is none."""
    try:
        plan = plan_rank(config_from_tables(layout, "a layout"), world_size, per_node)
    except UserError as error:
        return error
    assert plan.seconds is not None
    return Found(plan.seconds, plan.largest.peak, plan.bubble or 0.0, plan.microbatches[1])
