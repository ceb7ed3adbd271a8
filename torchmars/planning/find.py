"""Layouts that fit a number of GPUs, from the fastest on: estimates by formulas.

A step is compute, slowed by the pipeline's bubble, and the communication that nothing hides. The
formulas know less than a plan: plan the layout that you take.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from torchmars.config import ActivationCheckpointConfig, ResolvedConfig
from torchmars.config.compile import resolve_compile
from torchmars.core.errors import UserError
from torchmars.core.tables import table
from torchmars.data.tokenizer import load_tokenizer
from torchmars.metrics.throughput import GIB
from torchmars.models import Model, build_meta_model
from torchmars.parallel.checks import check_layout, check_memory
from torchmars.parallel.cuts import even_counts, stage_ranks
from torchmars.parallel.loss import chunk_tokens
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK, RESERVED, SPEEDS
from torchmars.planning.pipeline import computed_again
from torchmars.planning.work import Share, Work
from torchmars.training.optimizer import build_optimizer

WEIGHT_BYTES = 8  # float32 weights and gradients
AVERAGE_BYTES = 4  # the moving average of the weights
SHORTEST = 1024  # tokens of a sequence on a rank, below which kernels are slow
SHOWN = 8
# The options that are tried, beside what the config says.
TRIED = {
    "parallelism": (
        *("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "pp_schedule", "pp_blocks"),
        "accumulate",
    ),
    "training": ("microbatch_size",),
    "activation_checkpoint": ("mode", "every"),
}


@dataclass(frozen=True)
class Candidate:
    """A layout, and what is estimated of it."""

    config: ResolvedConfig
    microbatches: int
    bubble: float
    memory: float
    """Bytes of the rank that needs most."""
    seconds: float
    """Of a step."""

    def options(self, config: ResolvedConfig) -> str:
        """Return the options that make this layout of `config`."""
        pairs = [
            (f"--{section}.{name}", getattr(getattr(self.config, section), name))
            for section, names in TRIED.items()
            for name in names
            if getattr(getattr(self.config, section), name)
            != getattr(getattr(config, section), name)
        ]
        return " ".join(f"{name} {value}" for name, value in pairs)


def find_layouts(
    config: ResolvedConfig, world_size: int, per_node: int, memory: float
) -> list[Candidate]:
    """Return the layouts that fit GPUs with `memory` bytes each, the fastest first.

    Raises `UserError` if none fits.
    """
    model = build_meta_model(
        config.model, load_tokenizer(config.data.tokenizer).vocab_size, config.training.seq_len
    )
    optimizer = build_optimizer(config, model)
    work = Work.of(model).with_optimizer(optimizer)
    found = [
        estimate(each, work, world_size, per_node)
        for each in layouts(config, model, world_size, per_node)
    ]
    fitting = [each for each in found if each.memory < memory - RESERVED]
    if not fitting:
        least = min((each.memory for each in found), default=None)
        needs = f"the smallest needs {least / GIB:.0f} GiB" if least else "none divides"
        raise UserError(
            f"no layout of --world-size {world_size} fits --memory {memory / GIB:.0f} GiB, of "
            f"which about {RESERVED // GIB} are not free: {needs}: take more or larger GPUs, or "
            "lower training.seq_len"
        )
    return sorted(fitting, key=lambda each: each.seconds)


def layouts(
    config: ResolvedConfig, model: Model, world_size: int, per_node: int
) -> Iterator[ResolvedConfig]:
    """Yield the config with every layout that divides, tensor parallelism within machines."""
    length = config.training.seq_len
    for tp in powers_of_2(min(per_node or 1, world_size)):
        for pp in powers_of_2(min(len(model.blocks), world_size // tp)):
            for cp in powers_of_2(max(1, min(length // SHORTEST, world_size // (tp * pp)))):
                for schedule in ("1F1B", "Interleaved1F1B") if pp > 1 else ("1F1B",):
                    parallelism = replace(
                        config.parallelism,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=1,
                        dp_replicate=1,
                        dp_shard=-1,
                        pp_blocks=None,
                        pp_schedule=schedule,
                        accumulate="auto",
                    )
                    layout = replace(
                        config,
                        parallelism=parallelism,
                        activation_checkpoint=ActivationCheckpointConfig(),
                    )
                    yield from in_memory(layout, model, world_size, per_node)


def in_memory(
    layout: ResolvedConfig, model: Model, world_size: int, per_node: int
) -> Iterator[ResolvedConfig]:
    """Yield a layout that keeps all, with every microbatch size and way to use the memory.

    Experts stay whole or are dealt out within machines.
    """
    parallelism = layout.parallelism
    for size in powers_of_2(16):
        training = replace(layout.training, microbatch_size=size)
        try:
            degrees = parallelism.degrees(world_size)
            _, microbatches = training.microbatches(degrees.data, parallelism.stages)
            check_layout(replace(layout, training=training), degrees, model)
        except UserError:
            continue
        forms: list[Literal["auto", "whole"]] = ["auto", "whole"] if microbatches > 1 else ["auto"]
        modes: list[Literal["none", "selective", "full"]] = ["none", "selective", "full"]
        copies = powers_of_2(max(1, world_size // (degrees.tp * degrees.pp * degrees.cp * 8)))
        dealt = expert_degrees(model, per_node or world_size)
        for dp_replicate, ep, accumulate, mode in product(copies, dealt, forms, modes):
            each = replace(
                layout,
                parallelism=replace(
                    parallelism, dp_replicate=dp_replicate, ep=ep, accumulate=accumulate
                ),
                training=training,
                activation_checkpoint=ActivationCheckpointConfig(mode),
            )
            try:
                check_memory(each, each.parallelism.degrees(world_size))
            except UserError:
                continue
            yield each


def expert_degrees(model: Model, ranks: int) -> list[int]:
    """Return over how many of `ranks` the experts of `model` can be dealt out evenly."""
    shared = math.gcd(ranks, model.experts) if model.experts else 1
    return [ep for ep in range(1, shared + 1) if shared % ep == 0]


def powers_of_2(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]


def loss_memory(config: ResolvedConfig, model: Model, tp: int, tokens: int) -> int:
    """Return the bytes that the loss of a microbatch of `tokens` takes.

    They are a chunk of logits in bfloat16; two of float32, where the loss is not compiled; and the
    gradient of the head, two times.
    """
    rows = model.vocab_rows // tp
    resolved = resolve_compile(config, torch.device("cuda"), True, tp, None)
    per_logit = 2 if resolved.training.compile else 10
    return per_logit * min(tokens, chunk_tokens("cuda", rows)) * rows + 8 * rows * model.width


def estimate(config: ResolvedConfig, work: Work, world_size: int, per_node: int) -> Candidate:
    """Return a layout with its memory and the time of its step."""
    parallelism, training = config.parallelism, config.training
    share = Share(work, parallelism.degrees(world_size))
    size, microbatches = training.microbatches(share.degrees.data, parallelism.stages)
    tokens = size * training.seq_len // share.degrees.cp
    blocks = even_counts(len(work.model.blocks), parallelism.stages, work.head_in_blocks)
    costs = [count + 0.0 for count in blocks]
    costs[-1] += work.head_in_blocks
    ranks = parallelism.pp
    per_rank = [0.0] * ranks
    for rank, cost in zip(stage_ranks(parallelism), costs):
        per_rank[rank] += cost
    slowest = max(per_rank) / (sum(per_rank) / ranks)
    rounds = microbatches * parallelism.stages / ranks
    waiting = slowest * (rounds + ranks - 1) / rounds
    memory = memory_of(config, share, tokens, microbatches, max(blocks))
    computing, hidden = seconds_of(config, share, tokens, microbatches, per_node)
    seconds = config.optimizer.passes * (computing * waiting + hidden)
    seconds += work.owner_flops / world_size / FLOPS
    return Candidate(config, microbatches, 1 - 1 / waiting, memory, seconds)


def memory_of(
    config: ResolvedConfig, share: Share, tokens: int, microbatches: int, blocks: int
) -> float:
    """Return the bytes of the rank with most in flight, or of that with the head.

    `tokens` are those of a microbatch on a rank, and `blocks` those of a stage.
    """
    work, tp, ranks = share.work, share.degrees.tp, share.degrees.pp
    mode, travels = config.activation_checkpoint.mode, share.degrees.ep > 1
    hidden = 2 * tokens * work.model.width / tp
    logits = loss_memory(config, work.model, tp, tokens)
    kept = tokens * work.kept(tp, mode, travels) * blocks
    one = tokens * work.kept(tp, "none", travels)  # that is computed again
    stages = config.parallelism.stages // ranks
    flight = 1 if ranks == 1 else min(microbatches * stages, in_flight(ranks, stages))
    gathered = 2 * share.computed
    if ranks == 1:
        gathered = 4 * share.unit if share.received else 0
    buffers = 2 * stages * microbatches * hidden if ranks > 1 else 0
    # The gradients of experts' outputs, once more in float32: a router's weights are.
    backward = 6 * share.unit + 6 * tokens * work.rows / tp
    backward += one if computed_again(config.activation_checkpoint) else 0
    working = max(flight * kept + backward, (flight if ranks == 1 else 1) * kept + logits)
    stored = WEIGHT_BYTES + work.state + (AVERAGE_BYTES if config.training.ema_decay else 0)
    gradient = 4 * share.computed if keeps_whole_gradient(config, microbatches) else 0
    return stored * share.held + gathered + gradient + buffers + working


def keeps_whole_gradient(config: ResolvedConfig, microbatches: int) -> bool:
    """Return whether ranks keep the gradients of all that they compute with, for microbatches."""
    return microbatches > 1 and config.parallelism.accumulation == "whole"


def seconds_of(
    config: ResolvedConfig, share: Share, tokens: int, microbatches: int, per_node: int
) -> tuple[float, float]:
    """Return the time of the passes of a step, and what the traffic of weights adds to it.

    `tokens` are those of a microbatch on a rank.
    """
    work, degrees = share.work, share.degrees
    tp, cp, ep, ranks = degrees.tp, degrees.cp, degrees.ep, degrees.pp
    mode, again = config.activation_checkpoint.mode, computed_again(config.activation_checkpoint)
    world_size = ranks * degrees.data * cp * tp
    compute = work.flops * config.training.tokens_per_step / world_size / FLOPS
    compute *= 1 + again / 3
    gathers = 2 * microbatches if ranks == 1 else 1
    reductions = 1 if keeps_whole_gradient(config, microbatches) else microbatches
    inside = tp * share.shards <= per_node
    data = share.received * (2 * gathers + 4 * reductions) / (NVLINK if inside else NETWORK)
    if degrees.dp_replicate > 1:
        data += 8 * share.held / NETWORK
    # To compute again repeats what the forward pass sends, half of all; "selective" has kept what
    # came of reduce-scatters, and repeats the gathers.
    times = microbatches / ranks
    blocks, width = len(work.model.blocks), work.model.width
    repeated = 0.25 if mode == "selective" else 0.5 if again else 0.0
    # A block gathers and scatters twice, in both passes; what has experts once.
    sent = (8 * blocks - 4 * work.mixtures) * (tp - 1) / tp * 2 * tokens * width
    layers = times * (1 + repeated) * sent / NVLINK
    sent = (1.5 if again else 1) * 4 * (cp - 1) * 2 * tokens * work.keys / tp
    sequences = times * blocks * sent / (NVLINK if tp * cp <= per_node else NETWORK)
    # To experts and back, in both passes; "selective" has kept what came.
    rows = (4 + (2 * again if mode == "full" else 0)) * 2 * tokens * work.rows / tp * (ep - 1) / ep
    fits = per_node and per_node % ep == 0
    travels = times * work.mixtures * rows / (NVLINK if fits else NETWORK)
    return compute + layers + sequences + travels, max(0.0, data - compute)


def in_flight(ranks: int, stages: int) -> int:
    """Return how many passes the first rank of a pipeline keeps, each of one of its `stages`.

    That is 1F1B, or interleaved with more than one stage: Narayanan et al. 2021, arXiv 2104.04473.
    """
    return ranks if stages == 1 else 2 * (ranks - 1) + (stages - 1) * ranks + 1


def found_table(found: list[Candidate], config: ResolvedConfig) -> list[str]:
    """Return the best layouts in lines, with the options that make them of `config`."""
    rows = [
        (
            f"{each.seconds:.2f}",
            f"{each.memory / GIB:.0f}",
            f"{each.bubble:.0%}",
            str(each.microbatches),
            each.options(config),
        )
        for each in found[:SHOWN]
    ]
    return [
        *table([("s/step", "GiB", "waiting", "microbatches", "options"), *rows]),
        f"estimates, for {SPEEDS}: --confirm N plans the first N exactly; so does torchmars plan "
        "with the options of one, without --find",
    ]
