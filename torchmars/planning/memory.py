"""The memory of a rank, by formula: its part of weights and state, and what passes keep.

Weights, gradients and optimizer state follow from shapes, to the byte. What passes keep follows
from what each layer of a block saves for the backward pass: docs/planning.md says how well.
"""

import functools
import math
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchmars.config import Degrees, ResolvedConfig
from torchmars.config.ranks import resolve_dtypes
from torchmars.core.device import GPU_TYPE
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import Model, build_run_model
from torchmars.models.attention import has_kernel
from torchmars.optim.matrices.agreement import multiplies_bfloat16
from torchmars.parallel import cuts
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import prepared_data

ROWS = ("rows", "fused rows", "gathered rows", "tokens")
EXPERTS = "experts"


class Weight(NamedTuple):
    """A parameter, before any layout."""

    shape: tuple[int, ...]
    cut: str | None
    """By tensor parallelism, or "experts", which ep deals out; None: all ranks have it whole."""
    state: int
    """Bytes of the optimizer's state for each entry."""


class Placed(NamedTuple):
    """A weight on the ranks of a stage. The first has the largest shard: of ceil(size / n) rows."""

    gathered: int
    """Entries that a rank computes with."""
    held: int
    """Entries of the first rank's shard."""
    mesh: tuple[int, int, int]
    """The replicas, the ranks of FSDP, and those of tp or ep."""
    placements: tuple[Placement, ...]


@functools.lru_cache(maxsize=2**16)
def placed(weight: Weight, degrees: Degrees) -> Placed:
    """Return how a weight lies on a layout."""
    shape, shards, cut = list(weight.shape), degrees.dp_shard * degrees.cp, None
    mesh = degrees.dp_replicate, shards, degrees.tp
    if weight.cut == EXPERTS and degrees.ep > 1:
        mesh, cut = (degrees.dp_replicate, shards * degrees.tp // degrees.ep, degrees.ep), 0
    elif weight.cut in ROWS:
        cut = 0
    elif weight.cut == "columns" and len(shape) > 1:  # its bias is whole
        cut = 1
    if cut is not None:
        shape[cut] //= mesh[2]
    gathered = math.prod(shape)
    # Stacks by matrices, or else by their rows: `stack_placement` of parallel/fsdp.py.
    dim = int(len(shape) > 2 and shape[0] % mesh[1] > 0 and shape[1] % mesh[1] == 0)
    shape[dim] = -(-shape[dim] // mesh[1])
    strided = dim == cut and mesh[2] > 1
    shard = _StridedShard(dim, split_factor=mesh[2]) if strided else Shard(dim)
    placements = Replicate(), shard, Replicate() if cut is None else Shard(cut)
    return Placed(gathered, math.prod(shape), mesh, placements)


class ModelCosts:
    """The model of a config, its optimizer and data, before any layout.

    `config` is this config with resolved dtypes, and `data` is None if it is not prepared yet.
    """

    def __init__(self, config: ResolvedConfig, per_node: int) -> None:
        """Machines have `per_node` GPUs; 0: CPUs. Raises `UserError` for mistakes."""
        self.per_node, self.device = per_node, GPU_TYPE if per_node else "cpu"
        device = torch.device(self.device)
        # CPUs are taken to be like this one.
        self.config = resolve_dtypes(config, device, per_node > 0 or multiplies_bfloat16(device))
        self.data = prepared_data(config)
        tokens = self.data or load_tokenizer(config.data.tokenizer)
        self.model = model = build_run_model(config, tokens.vocab_size)
        self.optimizer = optimizer = build_optimizer(config, model)
        self.itemsize = getattr(torch, self.config.training.dtype).itemsize
        self.tied, self.flops = model.output is None, model.flops_per_token()
        self.head_in_blocks, self.routed = cuts.head_in_blocks(model), model.routed()
        self.weights = defaultdict[str, dict[str, Weight]](dict)
        """Of each block by its number, "first": of the embedding, "last": of norm and head."""
        for name, parameter in model.named_parameters():
            top, number, *_ = name.split(".")
            end = "first" if top in model.inputs else "last"
            stack = ".experts." in name and parameter.ndim == 3
            cut = EXPERTS if stack else cuts.cut_of(name.rpartition(".")[0], model.cuts)
            state = [*optimizer.state[parameter].values()]
            state += [optimizer.ahead[parameter]] if parameter in optimizer.ahead else []
            entry = sum(tensor.itemsize for tensor in state if tensor.ndim)
            weight = Weight(tuple(parameter.shape), cut, entry)
            self.weights[number if top == "blocks" else end][name] = weight
        self.kept = functools.cache(functools.partial(block_bytes, model, self.itemsize))


def block_bytes(
    model: Model, b: int, number: str, mode: str, tp: int, cp: int
) -> tuple[float, float]:
    """Return what a block keeps of each token of a rank, in bytes, and what it makes again.

    That is by a `mode` of activation checkpointing. The second has also what is in work at the
    worst moment of the backward pass. Entries of hidden states have `b` bytes. Layers are cut over
    `tp` ranks, and keys and values are gathered from `cp`.
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
    kept = {"none": none, "selective": selective, "full": full}[mode]
    return kept, none - kept + working


class LayoutMemory:
    """The memory of a layout's ranks. `config` has resolved dtypes."""

    def __init__(self, costs: ModelCosts, config: ResolvedConfig, degrees: Degrees) -> None:
        self.costs, self.config, self.degrees = costs, config, degrees
        self.parallelism, training = config.parallelism, config.training
        self.mode = config.activation_checkpoint.mode
        self.microbatches = training.microbatches(degrees.data, self.parallelism.stages)
        """Sequences of a microbatch, and microbatches of a step."""
        self.every = self.microbatches[1] * config.optimizer.passes
        """How many microbatches pass in a step: in exact mode twice."""
        self.tokens = self.microbatches[0] * training.seq_len // degrees.cp
        """Of a microbatch, on a rank."""
        self.hidden = self.tokens // degrees.tp * costs.model.width * costs.itemsize
        """Bytes of their hidden states between blocks."""
        self.stages = cuts.blocks_of_stages(costs.model, self.parallelism)
        self.ranks = [RankMemory(self, rank) for rank in range(degrees.pp)]
        """The memory of each rank of a pipeline, or of the only one."""
        self.largest = max(self.ranks, key=lambda rank: rank.peak)

    def entries(self, weights: Iterable[Weight]) -> tuple[int, int]:
        """Return how many entries of weights a rank computes with, and those of its shards."""
        found = [placed(each, self.degrees) for each in weights]
        return sum(each.gathered for each in found), sum(each.held for each in found)


class RankMemory:
    """What a rank of a pipeline, or each rank without one, has of a model; its memory in bytes."""

    def __init__(self, layout: LayoutMemory, rank: int) -> None:
        costs, pp, ep = layout.costs, layout.degrees.pp, layout.degrees.ep
        self.layout, self.rank, self.first, self.last = layout, rank, rank == 0, rank == pp - 1
        self.stages = {n: layout.stages[n] for n in range(rank, len(layout.stages), pp)}
        """The blocks of its stages, by number."""
        self.borders = 2 * len(self.stages) - self.first - self.last
        """How many other stages its own exchange hidden states with."""
        self.blocks = [str(block) for blocks in self.stages.values() for block in blocks]
        of_blocks = [costs.weights[block] for block in self.blocks]
        embedding = costs.weights["first"] if self.first else {}
        head = costs.weights["last"] if self.last else {}
        if self.last and costs.tied and not self.first:  # a copy, which the optimizer does not know
            embedding = {"copy": costs.weights["first"]["tok_embed.weight"]}
        self.tensors = dict(ChainMap(*of_blocks, embedding, head))
        """All weights that it has, by name."""
        dealt = [each for each in self.tensors.values() if each.cut == EXPERTS and ep > 1]
        self.experts = layout.entries(dealt)[0]
        """Entries of experts that are dealt out."""
        outside = [embedding | head] if costs.tied else [embedding, head]
        self.ends = [layout.entries(each.values())[0] for each in outside if each]
        """Entries of table and head, which are gathered apart."""
        sizes = [layout.entries(each.values())[0] for each in of_blocks]
        units = cuts.together(sizes, cuts.UNIT_BYTES[costs.device] // costs.itemsize)
        self.unit = max(sum(sizes[place] for place in each) for each in units)
        """Entries of the largest unit of blocks, which are gathered together."""
        self.computed, held = layout.entries(self.tensors.values())
        """Entries that it computes with."""
        every = self.computed - self.experts
        if cuts.is_one_unit(every * costs.itemsize, costs.device, layout.parallelism):
            self.unit, self.ends = every, [every]
        own = [weight for name, weight in self.tensors.items() if name != "copy"]
        average = layout.entries(own)[1] if layout.config.training.ema_decay else 0
        self.weights, self.gradients = 4 * (held + average), 4 * held
        """The first with their moving average, if the run keeps one."""
        self.optimizer_state = sum(
            placed(each, layout.degrees).held * each.state + 4 * (each.state > 0) for each in own
        )
        activations, gathered, self.moment = max(self.moments(), key=lambda each: sum(each[:2]))
        self.activations = round(activations)
        """And temporary tensors, at the peak; and buffers for what other stages send."""
        self.gathered = round(gathered)
        """Weights and gradients of other ranks' shards, and their buffers, at the peak. On a rank
        alone: the copies of weights that it computes with."""
        working = max(self.activations + self.gathered, self.gradients)
        self.peak = self.weights + self.optimizer_state + working
        """All memory of the rank at the worst moment of a step."""

    def moments(self) -> Iterator[tuple[float, float, str]]:
        """Yield activations and gathered bytes at the moments that may be the worst."""
        layout, (pp, _, dp_shard, cp, tp, ep) = self.layout, self.layout.degrees
        b, every = layout.costs.itemsize, self.computed
        many, shards = layout.microbatches[1] > 1, dp_shard * cp
        alone = math.prod(layout.degrees[:5]) == 1 and not layout.parallelism.cpu_offload
        whole = alone or layout.parallelism.accumulate == "whole"
        before = many * (4 * every if whole else self.gradients)  # of former microbatches
        kept, again = self.kept()
        loss, head = self.loss() if self.last else (0.0, 0)
        if alone:
            copies = b * every * (b < 4)
            at_loss = at_block = before + copies
            yield copies, before + copies + 4 * every, "the end of the backward pass"
        else:
            # FSDP keeps the buffers of an exchange until another follows.
            buffer = many * (not whole) * 4 * max([self.unit, *self.ends])
            at_loss = at_block = before + buffer + b * every
            if pp == 1 and layout.parallelism.blocks_reshard(shards):
                experts = b * self.experts * (shards * tp == ep)  # whole experts stay
                at_loss = before + buffer + 2 * b * self.ends[-1] + experts
                at_block = before + 2 * b * self.unit + 4 * self.ends[-1] + experts
        yield kept + again + head, at_block, "a block's backward pass"
        yield kept + loss, at_loss, "the loss"

    def kept(self) -> tuple[float, float]:
        """Return what passes keep, and what a block's backward pass makes again, or has in work."""
        layout, costs, training = self.layout, self.layout.costs, self.layout.config.training
        gathers = layout.degrees.cp if layout.parallelism.cp_method == "all-gather" else 1
        how = layout.mode, layout.degrees.tp, gathers
        of_token = [costs.kept(block, *how) for block in self.blocks]
        kept = self.in_flight() * layout.tokens * sum(each for each, _ in of_token)
        received = self.borders * layout.microbatches[1] * layout.hidden
        kernel = has_kernel(costs.device, getattr(torch, training.dtype), costs.model.dropout)
        masked = layout.config.data.separate_documents and not kernel  # a mask keeps them apart
        mask = layout.microbatches[0] * training.seq_len**2 * costs.itemsize * masked
        return kept + received + mask, layout.tokens * max(each for _, each in of_token)

    def in_flight(self) -> float:
        """Return of how many microbatches each stage keeps what passed, on average.

        Source: Narayanan et al. 2021, arXiv 2104.04473.
        """
        pp, places, every = self.layout.degrees.pp, len(self.stages), self.layout.microbatches[1]
        if pp > 1 and self.layout.parallelism.pp_schedule == "GPipe":
            return every
        # One stage on each rank, or two of the interleaved schedule.
        most = pp - self.rank if places == 1 else 3 * pp - 2 * self.rank - 1
        return min(most / places, every)

    def loss(self) -> tuple[float, int]:
        """Return the bytes in work while the loss is computed, and of the head's gradient."""
        layout, model, b = self.layout, self.layout.costs.model, self.layout.costs.itemsize
        rows = model.vocab_rows // layout.degrees.tp  # of the head, on a rank
        chunks = math.ceil(layout.tokens / cuts.chunk_tokens(layout.costs.device, rows))
        # Beside logits their probabilities in float32, where the loss is not compiled, and what
        # torch makes these from.
        logit = b if layout.config.training.compile else b + 4 + 4 * (b < 4)
        logits = math.ceil(layout.tokens / chunks) * rows * logit
        head = rows * model.width
        sums = head * (b if chunks == 1 else 4 + b * (b < 4))  # of chunks, in float32
        return logits + sums + layout.tokens * 3 * model.width * b, head * b
