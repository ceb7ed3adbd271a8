"""What does not go together in a layout: found before there are ranks."""

import math

from torchmars.config import Config, Degrees
from torchmars.config.fields import require
from torchmars.models import Model
from torchmars.parallel.pipeline import blocks_of_stages
from torchmars.parallel.tensor import cut_sizes


def check_layout(config: Config, degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for options that do not fit the degrees, the model, or each other.

    `model` may be on the meta device.
    """
    check_tensors(degrees, model)
    check_sequences(config, degrees, model)
    check_pipeline(config, degrees, model)


def check_tensors(degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for a model that tensor parallelism cannot cut evenly."""
    heads, kv_heads = model.heads
    sizes = {"attention heads": heads, "heads of keys and values": kv_heads, **cut_sizes(model)}
    for what, size in sizes.items():
        require(
            size % degrees.tp == 0,
            f"parallelism.tp = {degrees.tp} does not divide the {size} {what}: choose a divisor",
        )


def check_sequences(config: Config, degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for sequences that the ranks cannot cut evenly."""
    length, cp, tp = config.training.seq_len, degrees.cp, degrees.tp
    unit = tp if cp == 1 else math.lcm(2 * cp, cp * tp)
    require(
        length % unit == 0,
        f"training.seq_len = {length} is no multiple of {unit}, which parallelism.cp = {cp} and "
        f"parallelism.tp = {tp} cut it by: choose one",
    )
    for heads in model.heads:
        require(
            config.parallelism.cp_method != "ulysses" or heads // tp % cp == 0,
            f"parallelism.cp = {cp} does not divide the {heads // tp} heads of each rank: choose a "
            'divisor, or parallelism.cp_method = "all-gather"',
        )


def check_pipeline(config: Config, degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for blocks and microbatches that do not make a pipeline."""
    parallelism = config.parallelism
    _, microbatches = config.training.microbatches(degrees.data, parallelism.stages)
    blocks_of_stages(model, parallelism)
    if degrees.pp > 1 and parallelism.pp_schedule.startswith("Interleaved"):
        rounds = microbatches // degrees.pp
        require(
            microbatches % rounds == 0,
            f"{parallelism.pp_schedule} cannot deal out {microbatches} microbatches in rounds of "
            f"parallelism.pp = {degrees.pp}: choose training.microbatch_size so that their number "
            f"is a multiple of {degrees.pp}",
        )
