"""The memory of a rank, by formula: its part of weights and state, and what passes keep.

Weights, gradients and optimizer state follow from shapes, to the byte. What passes keep follows
from what each layer of a block saves for the backward pass: docs/planning.md says how well.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchmars.config import Degrees, ResolvedConfig
from torchmars.models import Model
from torchmars.models.attention import has_kernel
from torchmars.optim import MARS
from torchmars.parallel import cuts

ROWS = ("rows", "fused rows", "gathered rows", "tokens")


class Weight(NamedTuple):
    """A parameter as layouts cut it."""

    shape: tuple[int, ...]
    cut: str | None
    """By tensor parallelism; None: all ranks have it whole."""
    experts: bool
    """Whether it is a stack of experts' matrices, which ep deals out."""
    state: int
    """Bytes of the optimizer's state for each entry."""


Weights = Mapping[str, Weight]  # by name


@functools.lru_cache(maxsize=2**16)
def entries_of(weight: Weight, degrees: Degrees) -> tuple[int, int, int]:
    """Return how many entries the first rank computes with, and its shard's; and the dim cut.

    Its shard is the largest: torch cuts into pieces of ceil(size / n).
    """
    shape, shards = list(weight.shape), degrees.dp_shard * degrees.cp
    if weight.experts and degrees.ep > 1:
        shape[0] //= degrees.ep
        shards = shards * degrees.tp // degrees.ep
    elif weight.cut in ROWS:
        shape[0] //= degrees.tp
    elif weight.cut == "columns" and len(shape) > 1:  # its bias is whole
        shape[1] //= degrees.tp
    gathered = math.prod(shape)
    # Stacks by matrices, or else by their rows: `stack_placement` of parallel/fsdp.py.
    dim = int(len(shape) > 2 and shape[0] % shards > 0 and shape[1] % shards == 0)
    shape[dim] = -(-shape[dim] // shards)
    return gathered, math.prod(shape), dim


class ModelCosts:
    """A model and its optimizer, before any layout; `itemsize` is that of the compute dtype."""

    def __init__(self, model: Model, optimizer: MARS, itemsize: int) -> None:
        self.model, self.optimizer, self.itemsize = model, optimizer, itemsize
        self.tied, self.flops = model.output is None, model.flops_per_token()
        self.head_in_blocks, self.routed = cuts.head_in_blocks(model), model.routed()
        states = state_bytes(optimizer)
        self.blocks: list[dict[str, Weight]] = [{} for _ in model.blocks]
        """The weights of each block, and those of the embedding, and of the last norm and head."""
        self.first: dict[str, Weight] = {}
        self.last: dict[str, Weight] = {}
        for name, parameter in model.named_parameters():
            top, number, *_ = name.split(".")
            of_ends = self.first if top in model.inputs else self.last
            module, experts = name.rpartition(".")[0], ".experts." in name and parameter.ndim == 3
            cut = None if experts else cuts.cut_of(module, model.cuts)
            weight = Weight(tuple(parameter.shape), cut, experts, states[name])
            (self.blocks[int(number)] if top == "blocks" else of_ends)[name] = weight
        alike: dict[object, str] = {}
        self.alike = [
            alike.setdefault((*weights.values(),), str(number))
            for number, weights in enumerate(self.blocks)
        ]
        """Of each block the number of the first that is like it."""
        self.kept = functools.cache(functools.partial(block_bytes, model, itemsize))


def state_bytes(optimizer: MARS) -> dict[str, int]:
    """Return the bytes of state for each entry of each parameter, by name."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            tensors = [each for each in optimizer.state[parameter].values() if each.ndim]
            tensors += [optimizer.ahead[parameter]] if parameter in optimizer.ahead else []
            found[name] = sum(each.itemsize for each in tensors)
    return found


def block_bytes(model: Model, b: int, number: str, tp: int, cp: int) -> dict[str, float]:
    """Return what block `number` keeps of each token of a rank, layer by layer, in bytes.

    By the mode of activation checkpointing; "working": in the backward pass, at its worst moment.
    Entries of hidden states have `b` bytes. Layers are cut over `tp` ranks, and keys and values are
    gathered from `cp`.
    """
    none = selective = 0.0
    mixture = model.routed().get(number)
    inputs: dict[tuple[str, int, bool], float] = {}  # layers that take the same keep it once
    for name, module in model.blocks[number].named_modules():
        weight, (parent, _, own) = module._parameters.get("weight"), name.rpartition(".")
        if weight is None or (mixture is not None and module is mixture.router):
            continue
        if weight.ndim == 1:
            heads = dict(zip("qk", model.heads)).get(own[:1], 1)
            width = len(weight) * (heads if len(weight) == model.head_width else 1)
            # Of an RMS norm two entries in float32.
            none += width * (b if isinstance(module, nn.LayerNorm) else 8) / tp
            continue
        outs, ins = weight.flatten(1).shape
        cut = cuts.cut_of(f"blocks.{number}.{name}", model.cuts)
        place, share = (parent, ins, cut == "columns"), 1 if cut in ROWS else 1 / tp
        inputs[place] = max(inputs.get(place, 0.0), ins * b * share)
        if cut == "columns":  # sums on all ranks, and this rank's part of them
            selective += outs * b * (1 + (tp > 1) / tp)
        else:
            selective += outs * b / tp
            if parent.startswith("mlp"):  # of a gate also what its activation made
                none += outs * b * (1 + (own == "gate")) / tp
    # Queries, keys, values and what is mixed of them, all as wide, and sums of exponentials.
    heads, kv_heads = model.heads
    wide = max(model.head_width, model.mixed_width // heads - model.head_width)
    mixed = heads * (wide * b + 4) / tp
    none += sum(inputs.values()) + mixed + (heads + 2 * kv_heads * cp) * wide * b / tp
    none += 2 * model.width * (model.dropout > 0)
    selective += mixed + model.width * b / tp
    full, working = model.width * b / tp, float(model.width * b)
    if mixture is not None:
        used = mixture.router.used
        within = next(mixture.experts.parameters()).shape[1]
        none += used * (4 * within + 2 * model.width) * b / tp
        selective += used * (2 * within + 3 * model.width) * b / tp
        # Gradients of experts' outputs, once more in float32: the weights of a router are.
        working = used * (4 + b) * model.width / tp
    return {"none": none, "selective": selective, "full": full, "working": working}


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank of a pipeline, or of each rank without one, in bytes."""

    stages: dict[int, range]
    """The blocks of its stages, by number."""
    parameters: int
    """How many these have."""
    weights: int
    """And of their moving average, if the run keeps one."""
    gradients: int
    optimizer_state: int
    received: int
    """Buffers for hidden states from other stages of a pipeline."""
    gathered: int
    """Weights and gradients of other ranks' shards, and their buffers, at the peak. On a rank
    alone: the copies of weights that it computes with."""
    activations: int
    """And temporary tensors, at the peak."""
    moment: str
    """When the peak is."""

    @property
    def peak(self) -> int:
        """All memory of the rank at the worst moment of a step."""
        working = max(self.activations + self.gathered, self.gradients)
        return self.weights + self.optimizer_state + self.received + working


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, or the whole model, on a rank."""

    first: bool
    last: bool
    blocks: range
    weights: dict[str, Weight]
    dealt: list[int]
    """Entries of experts that are dealt out, block by block."""
    ends: list[int]
    """Entries of table and head, which are gathered apart."""
    unit: int
    """Entries of the largest unit of blocks, which are gathered together."""
    kept: float
    """Bytes that the blocks keep of a microbatch."""
    again: float
    """Bytes made again, or in work, in a block's backward pass."""


class LayoutMemory:
    """The memory of a layout's ranks, on devices of type `device`. The dtype is resolved."""

    def __init__(
        self, costs: ModelCosts, config: ResolvedConfig, degrees: Degrees, device: str
    ) -> None:
        self.costs, self.config, self.degrees, self.device = costs, config, degrees, device
        training, self.parallelism = config.training, config.parallelism
        self.mode = config.activation_checkpoint.mode
        stages = self.parallelism.stages
        self.size, self.microbatches = training.microbatches(degrees.data, stages)
        self.passes = config.optimizer.passes
        self.every = self.microbatches * self.passes
        """How many microbatches pass in a step: in exact mode twice."""
        self.tokens = self.size * training.seq_len // degrees.cp
        kernel = has_kernel(device, getattr(torch, training.dtype), costs.model.dropout)
        masked = config.data.separate_documents and not kernel
        self.mask = self.size * training.seq_len**2 * costs.itemsize * masked
        """Bytes of the mask that keeps documents apart, where no kernel does."""
        self.hidden = self.tokens // degrees.tp * costs.model.width * costs.itemsize
        """Bytes of a microbatch's hidden states between blocks."""
        self.alone = math.prod(degrees[:5]) == 1 and not self.parallelism.cpu_offload
        blocks = cuts.blocks_of_stages(costs.model, self.parallelism)
        self.parts = [
            self.part(each, number == 0, number == len(blocks) - 1)
            for number, each in enumerate(blocks)
        ]
        self.own = [
            [n for n, each in enumerate(cuts.stage_ranks(self.parallelism)) if each == rank]
            for rank in range(degrees.pp)
        ]
        """The stages of each rank of the pipeline."""
        self.rows = costs.model.vocab_rows // degrees.tp  # of the head, on a rank
        self.chunks = math.ceil(self.tokens / cuts.chunk_tokens(device, self.rows))
        self.ranks = [self.rank(rank) for rank in range(degrees.pp)]
        """The memory of each rank of the pipeline, or of the only one."""

    def entries(self, weights: Iterable[Weight]) -> tuple[int, int]:
        """Return how many entries of weights a rank computes with, and those of its shards."""
        found = [entries_of(each, self.degrees) for each in weights]
        return sum(each[0] for each in found), sum(each[1] for each in found)

    def kept(self, block: int) -> dict[str, float]:
        """Return what a block keeps of a token, in bytes."""
        gathered = self.degrees.cp if self.parallelism.cp_method == "all-gather" else 1
        return self.costs.kept(self.costs.alike[block], self.degrees.tp, gathered)

    def part(self, blocks: range, first: bool, last: bool) -> Stage:
        """Return a stage that has these blocks."""
        costs, ep = self.costs, self.degrees.ep
        weights, sizes, dealt, kept, again = dict[str, Weight](), [], [], 0.0, 0.0
        for block in blocks:
            weights |= costs.blocks[block]
            own = costs.blocks[block].values()
            dealt.append(self.entries(each for each in own if each.experts and ep > 1)[0])
            sizes.append(self.entries(own)[0] - dealt[-1])
            each = self.kept(block)
            kept += self.tokens * each[self.mode]
            made = each["none"] - each[self.mode] + each["working"]
            again = max(again, self.tokens * made)
        units = cuts.together(sizes, cuts.UNIT_BYTES[self.device] // costs.itemsize)
        unit = max(sum(sizes[place] for place in each) for each in units)
        embedding, head = costs.first if first else {}, costs.last if last else {}
        if last and costs.tied and not first:  # a copy, which the optimizer does not know
            embedding = {"copy": costs.first["tok_embed.weight"]}
        outside = [embedding | head] if costs.tied else [embedding, head]
        ends = [self.entries(each.values())[0] for each in outside if each]
        weights |= embedding | head
        every = self.entries(weights.values())[0] - sum(dealt)
        if cuts.is_one_unit(every * costs.itemsize, self.device, self.parallelism):
            unit, ends = every, [every]
        return Stage(first, last, blocks, weights, dealt, ends, unit, kept, again)

    def loss(self) -> tuple[float, int]:
        """Return the bytes in work while the loss is computed, and of the head's gradient."""
        model, b, tokens = self.costs.model, self.costs.itemsize, self.tokens
        # Beside logits their probabilities in float32, where the loss is not compiled, and what
        # torch makes these from.
        logit = b if self.config.training.compile else b + 4 + 4 * (b < 4)
        head = self.rows * model.width
        sums = head * (b if self.chunks == 1 else 4 + b * (b < 4))  # of chunks, in float32
        hidden = 3 * model.width * b
        chunk = math.ceil(tokens / self.chunks) * self.rows
        return chunk * logit + sums + tokens * hidden, head * b

    def rank(self, rank: int) -> RankMemory:
        """Return the memory of a rank of the pipeline."""
        parts = [self.parts[number] for number in self.own[rank]]
        every = [each for part in parts for each in part.weights.items()]
        own = [weight for name, weight in every if name != "copy"]
        held, average = self.entries(each for _, each in every)[1], self.config.training.ema_decay
        worst = max(self.moments(rank, parts), key=lambda each: each[0] + each[1])
        buffers = sum(not end for part in parts for end in (part.first, part.last))
        return RankMemory(
            stages={number: self.parts[number].blocks for number in self.own[rank]},
            parameters=sum(math.prod(each.shape) for each in own),
            weights=4 * held + (4 * self.entries(own)[1] if average else 0),
            gradients=4 * held,
            optimizer_state=sum(
                entries_of(each, self.degrees)[1] * each.state + 4 * (each.state > 0)
                for each in own
            ),
            received=buffers * self.microbatches * self.hidden if self.degrees.pp > 1 else 0,
            gathered=round(worst[1]),
            activations=round(worst[0]),
            moment=worst[2],
        )

    def moments(self, rank: int, parts: list[Stage]) -> Iterator[tuple[float, float, str]]:
        """Yield activations and gathered bytes at the moments that may be the worst."""
        gathered, held = self.entries(each for part in parts for each in part.weights.values())
        b, many, last = self.costs.itemsize, self.microbatches > 1, parts[-1]
        whole = self.alone or self.parallelism.accumulate == "whole"
        before = many * 4 * (gathered if whole else held)  # gradients of former microbatches
        kept = self.mask + self.in_flight(rank, len(parts)) * sum(part.kept for part in parts)
        loss, head = self.loss() if last.last else (0.0, 0)
        again = max(part.again for part in parts) + head
        if self.alone:
            copies = b * gathered * (b < 4)
            at_loss = at_block = before + copies
            yield copies, before + copies + 4 * gathered, "the end of the backward pass"
        else:
            # FSDP keeps the buffers of an exchange until another follows.
            largest = max(size for part in parts for size in (part.unit, *part.ends))
            buffer = many * (not whole) * 4 * largest
            shards = self.degrees.dp_shard * self.degrees.cp
            at_loss = at_block = before + buffer + b * gathered
            if self.degrees.pp == 1 and self.parallelism.blocks_reshard(shards):
                alone = shards * self.degrees.tp == self.degrees.ep  # whole experts stay
                dealt = b * (sum(last.dealt) if alone else 2 * max(last.dealt))
                at_loss = before + buffer + 2 * b * last.ends[-1] + alone * dealt
                at_block = before + 2 * b * last.unit + dealt + 4 * last.ends[-1]
        yield kept + again, at_block, "a block's backward pass"
        yield kept + loss, at_loss, "the loss"

    def in_flight(self, rank: int, places: int) -> float:
        """Return of how many microbatches each of a rank's stages keeps what passed, on average.

        Source: Narayanan et al. 2021, arXiv 2104.04473.
        """
        ranks, every = self.degrees.pp, self.microbatches * places
        if ranks == 1:
            return 1
        most = ranks - rank if places == 1 else 2 * (ranks - rank - 1) + (places - 1) * ranks + 1
        return (every if self.parallelism.pp_schedule == "GPipe" else min(most, every)) / places
