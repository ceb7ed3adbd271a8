"""Layouts that fit a number of GPUs, from the fastest on: estimates by formulas.

A step is compute, slowed by the pipeline's bubble, and the communication that nothing hides. The
formulas know less than a plan: plan the layout that you take.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchmars.config import ParallelismConfig, ResolvedConfig, TrainingConfig
from torchmars.core.errors import UserError
from torchmars.core.tables import table
from torchmars.data.tokenizer import TOKENIZERS
from torchmars.metrics.throughput import GIB
from torchmars.models import Model, build_meta_model
from torchmars.parallel.checks import check_layout
from torchmars.parallel.pipeline import blocks_of_stages, stage_ranks

FLOPS = 400e12  # per second, that kernels of large models reach on an H100 in bfloat16
NETWORK = 50e9  # bytes per second of each GPU between machines: 400 Gb/s
NVLINK = 350e9  # within a machine, what collectives reach
RESERVED = 8 * GIB  # CUDA, NCCL and a fragmented allocator
WEIGHT_BYTES = 16  # float32 weights, gradients and two moments
SHOWN = 8


@dataclass(frozen=True)
class Candidate:
    """A layout, and what is estimated of it."""

    parallelism: ParallelismConfig
    training: TrainingConfig
    microbatches: int
    bubble: float
    memory: float
    """Bytes of the rank that needs most."""
    seconds: float
    """Of a step."""

    @property
    def options(self) -> str:
        """The options that choose this layout."""
        parallelism = self.parallelism
        chosen = {
            f"parallelism.{name}": getattr(parallelism, name)
            for name in ("tp", "pp", "cp", "dp_replicate", "pp_schedule")
            if getattr(parallelism, name) != getattr(ParallelismConfig(), name)
        }
        chosen["training.microbatch_size"] = self.training.microbatch_size
        return " ".join(f"--{name} {value}" for name, value in chosen.items())


def find_layouts(
    config: ResolvedConfig, world_size: int, per_node: int, memory: float
) -> list[Candidate]:
    """Return the layouts that fit GPUs with `memory` bytes each, the fastest first.

    Raises `UserError` if none fits.
    """
    model = build_meta_model(
        config.model, TOKENIZERS[config.data.tokenizer].vocab_size, config.training.seq_len
    )
    found = [
        estimate(each, model, world_size, per_node)
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
    long = config.training.seq_len >= 32_768
    for tp in powers_of_2(min(per_node or 1, world_size)):
        for pp in powers_of_2(min(len(model.blocks), world_size // tp)):
            for cp in powers_of_2(16 if long else 1):
                for dp_replicate in powers_of_2(max(1, world_size // (tp * pp * cp * 8))):
                    for schedule in ("1F1B", "Interleaved1F1B") if pp > 1 else ("1F1B",):
                        for size in powers_of_2(16):
                            layout = replace(
                                config.parallelism,
                                tp=tp,
                                pp=pp,
                                cp=cp,
                                dp_replicate=dp_replicate,
                                dp_shard=-1,
                                pp_blocks=None,
                                pp_schedule=schedule,
                            )
                            training = replace(config.training, microbatch_size=size)
                            each = replace(config, parallelism=layout, training=training)
                            try:
                                check_layout(each, layout.degrees(world_size), model)
                            except UserError:
                                continue
                            yield each


def powers_of_2(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to `most`."""
    size = 1
    while size <= most:
        yield size
        size *= 2


def estimate(config: ResolvedConfig, model: Model, world_size: int, per_node: int) -> Candidate:
    """Return a layout with its memory and the time of its step."""
    parallelism, training = config.parallelism, config.training
    degrees = parallelism.degrees(world_size)
    size, microbatches = training.microbatches(degrees.data, parallelism.stages)
    work = Work.of(model, config)
    ranks = parallelism.pp
    tokens = size * training.seq_len // degrees.cp  # of a microbatch on a rank
    shards = degrees.dp_shard * degrees.cp
    costs = [len(blocks) + 0.0 for blocks in work.stages]
    costs[-1] += work.head_in_blocks
    per_rank = [0.0] * ranks
    for rank, cost in zip(stage_ranks(parallelism), costs):
        per_rank[rank] += cost
    slowest = max(per_rank) / (sum(per_rank) / ranks)
    rounds = microbatches * parallelism.stages / ranks
    waiting = slowest * (rounds + ranks - 1) / rounds

    # Memory, of the rank with most in flight and of that with the head.
    weights = work.parameters / ranks / degrees.tp
    unit = max(work.block, work.rest / ranks) / degrees.tp
    hidden = 2 * tokens * model.width / degrees.tp
    logits = 10 * tokens * model.vocab_rows / degrees.tp
    kept = tokens * work.kept(degrees.tp) * max(map(len, work.stages))
    stages = parallelism.stages // ranks
    flight = 1 if ranks == 1 else min(microbatches * stages, in_flight(ranks, stages))
    gradient = 4 * weights if microbatches > 1 else 0
    gathered = 2 * weights if ranks > 1 else 4 * unit
    buffers = 2 * stages * microbatches * hidden if ranks > 1 else 0
    passes = max(flight * kept + 6 * unit, (flight if ranks == 1 else 1) * kept + logits)
    memory = WEIGHT_BYTES * weights / shards + gathered + gradient + buffers + passes

    # Time.
    compute = work.flops * training.global_batch_size / world_size / FLOPS
    inside = degrees.tp * shards <= per_node
    dealt = (shards - 1) / shards * weights
    gathers = 2 * microbatches if ranks == 1 else 1
    data = dealt * (2 * gathers + 4) / (NVLINK if inside else NETWORK)
    if degrees.dp_replicate > 1:
        data += 8 * weights / shards / NETWORK
    each = microbatches * sum(map(len, work.stages)) / ranks
    layers = each * 8 * (degrees.tp - 1) / degrees.tp * 2 * tokens * model.width / NVLINK
    keys = each * 4 * (degrees.cp - 1) * 2 * tokens * work.keys / degrees.tp
    sequences = keys / (NVLINK if degrees.tp * degrees.cp <= per_node else NETWORK)
    seconds = (compute + layers + sequences) * waiting + max(0.0, data - compute)
    return Candidate(parallelism, training, microbatches, 1 - 1 / waiting, memory, seconds)


def in_flight(ranks: int, stages: int) -> int:
    """Return how many passes the first rank of a pipeline keeps, each of one of its `stages`.

    That is 1F1B, or interleaved with more than one stage: Narayanan et al. 2021, arXiv 2104.04473.
    """
    return ranks if stages == 1 else 2 * (ranks - 1) + (stages - 1) * ranks + 1


@dataclass(frozen=True)
class Work:
    """What a model takes, whatever the layout."""

    stages: list[range]
    parameters: int
    block: int
    """Parameters of a block."""
    rest: int
    """Parameters outside of blocks."""
    flops: int
    """Of a sequence."""
    head_in_blocks: float
    """The FLOPs of the head, in those of a block."""
    keys: int
    """Width of keys and values together."""
    whole_inputs: int
    """Bytes kept for a token in a block, whatever tp is: inputs of attention and MLP."""
    cut: int
    """Bytes kept for a token in a block that tp ranks share."""

    @classmethod
    def of(cls, model: Model, config: ResolvedConfig) -> "Work":
        """Return what `model` takes. A tensor that a layer takes or gives is kept in bfloat16."""
        block = model.blocks["0"]
        parameters = sum(each.numel() for each in model.parameters())
        own = sum(each.numel() for each in block.parameters())
        matrices = {name: each for name, each in block.named_parameters() if each.ndim == 2}
        taken = sum(each.shape[1] for name, each in matrices.items() if "proj" in name)
        given = sum(each.shape[0] for name, each in matrices.items() if "proj" not in name)
        head = 6 * model.vocab_rows * model.width
        blocks = (model.flops_per_token() - head) / len(model.blocks)
        heads, kv_heads = model.heads
        return cls(
            blocks_of_stages(model, config.parallelism),
            parameters,
            own,
            parameters - len(model.blocks) * own,
            model.flops_per_token() * config.training.seq_len,
            head / blocks,
            2 * model.width * kv_heads // heads,
            whole_inputs=4 * model.width,
            # What a layer gives is kept once more after an activation function or a rotation.
            cut=4 * given + 2 * taken + 12 * model.width,
        )

    def kept(self, tp: int) -> float:
        """Return the bytes that a block keeps for each token until its backward pass."""
        return self.whole_inputs + self.cut / tp


def found_table(found: list[Candidate]) -> list[str]:
    """Return the best layouts in lines, with what is assumed."""
    rows = [
        (
            f"{each.seconds:.2f}",
            f"{each.memory / GIB:.0f}",
            f"{each.bubble:.0%}",
            str(each.microbatches),
            each.options,
        )
        for each in found[:SHOWN]
    ]
    return [
        *table([("s/step", "GiB", "waiting", "microbatches", "options"), *rows]),
        f"estimates, for {FLOPS / 1e12:.0f} TFLOP/s of each GPU, {NVLINK / 1e9:.0f} GB/s within a "
        f"machine and {NETWORK / 1e9:.0f} GB/s between machines: plan the one that you take",
    ]
