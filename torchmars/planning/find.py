"""Layouts that fit a number of GPUs, from the fastest on: estimates by formulas.

A step is compute, slowed by the pipeline's bubble, and the communication that nothing hides. The
formulas know less than a plan: plan the layout that you take.
"""

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
from torchmars.optim import MARS
from torchmars.parallel.checks import check_layout, check_memory
from torchmars.parallel.cuts import cut_of, even_counts, head_in_blocks, stage_ranks
from torchmars.parallel.loss import chunk_tokens
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK, RESERVED, SPEEDS
from torchmars.planning.pipeline import computed_again
from torchmars.training.optimizer import build_optimizer

WEIGHT_BYTES = 8  # float32 weights and gradients
AVERAGE_BYTES = 4  # the moving average of the weights
SHORTEST = 1024  # tokens of a sequence on a rank, below which kernels are slow
SHOWN = 8
# The options that are tried, beside what the config says.
TRIED = {
    "parallelism": (
        *("dp_replicate", "dp_shard", "tp", "cp", "pp", "pp_schedule", "pp_blocks"),
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
                    yield from in_memory(layout, model, world_size)


def in_memory(layout: ResolvedConfig, model: Model, world_size: int) -> Iterator[ResolvedConfig]:
    """Yield a layout that keeps all, with every microbatch size and way to use the memory."""
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
        ways = product(copies, forms, modes)
        for dp_replicate, accumulate, mode in ways:
            each = replace(
                layout,
                parallelism=replace(parallelism, dp_replicate=dp_replicate, accumulate=accumulate),
                training=training,
                activation_checkpoint=ActivationCheckpointConfig(mode),
            )
            try:
                check_memory(each, each.parallelism.degrees(world_size))
            except UserError:
                continue
            yield each


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


def estimate(config: ResolvedConfig, work: "Work", world_size: int, per_node: int) -> Candidate:
    """Return a layout with its memory and the time of its step."""
    model, parallelism, training = work.model, config.parallelism, config.training
    degrees = parallelism.degrees(world_size)
    size, microbatches = training.microbatches(degrees.data, parallelism.stages)
    mode, again = config.activation_checkpoint.mode, computed_again(config.activation_checkpoint)
    ranks = parallelism.pp
    tokens = size * training.seq_len // degrees.cp  # of a microbatch on a rank
    shards = degrees.dp_shard * degrees.cp
    blocks = even_counts(len(model.blocks), parallelism.stages, work.head_in_blocks)
    costs = [count + 0.0 for count in blocks]
    costs[-1] += work.head_in_blocks
    per_rank = [0.0] * ranks
    for rank, cost in zip(stage_ranks(parallelism), costs):
        per_rank[rank] += cost
    slowest = max(per_rank) / (sum(per_rank) / ranks)
    rounds = microbatches * parallelism.stages / ranks
    waiting = slowest * (rounds + ranks - 1) / rounds
    whole_gradient = microbatches > 1 and parallelism.accumulation == "whole"

    # Memory, of the rank with most in flight and of that with the head.
    weights = work.parameters / ranks / degrees.tp
    unit = max(work.block, work.rest / ranks) / degrees.tp
    hidden = 2 * tokens * model.width / degrees.tp
    logits = loss_memory(config, model, degrees.tp, tokens)
    kept = tokens * work.kept(degrees.tp, mode) * max(blocks)
    one = tokens * work.kept(degrees.tp, "none")  # that is computed again
    stages = parallelism.stages // ranks
    flight = 1 if ranks == 1 else min(microbatches * stages, in_flight(ranks, stages))
    gradient = 4 * weights if whole_gradient else 0
    gathered = 4 * unit if ranks == 1 < shards else 2 * weights
    buffers = 2 * stages * microbatches * hidden if ranks > 1 else 0
    backward = 6 * unit + (one if again else 0)
    working = max(flight * kept + backward, (flight if ranks == 1 else 1) * kept + logits)
    stored = WEIGHT_BYTES + work.state + (AVERAGE_BYTES if training.ema_decay else 0)
    memory = stored * weights / shards + gathered + gradient + buffers + working

    # Time.
    compute = work.flops * training.tokens_per_step / world_size / FLOPS
    compute *= 1 + again / 3
    inside = degrees.tp * shards <= per_node
    dealt = (shards - 1) / shards * weights
    gathers = 2 * microbatches if ranks == 1 else 1
    reductions = 1 if whole_gradient else microbatches
    data = dealt * (2 * gathers + 4 * reductions) / (NVLINK if inside else NETWORK)
    if degrees.dp_replicate > 1:
        data += 8 * weights / shards / NETWORK
    # To compute again repeats what the forward pass sends, half of all; "selective" has kept what
    # came of reduce-scatters, and repeats the gathers.
    each = microbatches * len(model.blocks) / ranks
    repeated = 0.25 if mode == "selective" else 0.5 if again else 0.0
    sent = 8 * (degrees.tp - 1) / degrees.tp * 2 * tokens * model.width
    layers = each * (1 + repeated) * sent / NVLINK
    keys = each * (1.5 if again else 1) * 4 * (degrees.cp - 1) * 2 * tokens * work.keys / degrees.tp
    sequences = keys / (NVLINK if degrees.tp * degrees.cp <= per_node else NETWORK)
    passes = 2 if config.optimizer.mode == "exact" else 1
    seconds = passes * ((compute + layers + sequences) * waiting + max(0.0, data - compute))
    seconds += work.owner_flops / world_size / FLOPS
    return Candidate(config, microbatches, 1 - 1 / waiting, memory, seconds)


def in_flight(ranks: int, stages: int) -> int:
    """Return how many passes the first rank of a pipeline keeps, each of one of its `stages`.

    That is 1F1B, or interleaved with more than one stage: Narayanan et al. 2021, arXiv 2104.04473.
    """
    return ranks if stages == 1 else 2 * (ranks - 1) + (stages - 1) * ranks + 1


@dataclass(frozen=True)
class Work:
    """What a model and its optimizer take, whatever the layout."""

    model: Model
    """Without memory."""
    parameters: int
    block: int
    """Parameters of a block."""
    rest: int
    """Parameters outside of blocks."""
    flops: int
    """Of a token."""
    head_in_blocks: float
    """The FLOPs of the head, in those of a block."""
    keys: int
    """Width of keys and values together."""
    given: int
    """Width of what layers before attention and the activation function give, of a block."""
    taken: int
    """Width of what the layers after them take."""
    state: float = 0.0
    """Bytes of the optimizer's state for each parameter."""
    owner_flops: int = 0
    """Of all orthogonalisations of a step."""

    @classmethod
    def of(cls, model: Model) -> "Work":
        """Return what `model` takes, without an optimizer."""
        block = model.blocks["0"]
        parameters = model.parameter_count
        own = sum(each.numel() for each in block.parameters())
        matrices = [
            (cut_of(name.removesuffix(".weight"), model.cuts), each)
            for name, each in model.named_parameters()
            if name.startswith("blocks.0.") and each.ndim == 2
        ]
        return cls(
            model,
            parameters,
            own,
            parameters - len(model.blocks) * own,
            model.flops_per_token(),
            head_in_blocks(model),
            2 * model.heads[1] * model.head_width,
            given=sum(each.shape[0] for cut, each in matrices if cut != "columns"),
            taken=sum(each.shape[1] for cut, each in matrices if cut == "columns"),
        )

    def with_optimizer(self, optimizer: MARS) -> "Work":
        """Return the same with what `optimizer` takes, the whole model's, without memory."""
        tensors = [tensor for each in optimizer.state.values() for tensor in each.values()]
        tensors += optimizer.ahead.last_grads.values()
        flops = sum(sum(loads.values()) for loads in optimizer.plans.owner_loads.values())
        state = sum(tensor.nbytes for tensor in tensors) / self.parameters
        return replace(self, state=state, owner_flops=flops)

    def kept(self, tp: int, mode: str) -> float:
        """Return the bytes that a block keeps for each token until its backward pass.

        They are bfloat16. `mode`: of activation checkpointing.
        """
        width = self.model.width
        if mode == "full":
            return 2 * width / tp
        if mode == "selective":
            # The sums of attention and MLP over tp are whole on each rank before they are added.
            sums = 4 * width if tp > 1 else 0
            return 4 * width + (2 * self.given + 4 * width + sums) / tp
        # Each rank has the whole inputs of attention and MLP. What a layer gives is kept once more
        # after an activation function or a rotation.
        return 4 * width + (4 * self.given + 2 * self.taken + 12 * width) / tp


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
