"""Checks of a layout that need no ranks."""

from torchmars.config import Config, Degrees
from torchmars.config.fields import require
from torchmars.config.ranks import compile_problem
from torchmars.core.words import counted
from torchmars.models import Model
from torchmars.parallel.cuts import blocks_of_stages, cut_sizes, sequence_unit

# torch's grouped_mm takes rows of a multiple of 16 bytes. In bfloat16 that is so many numbers.
GROUPED_SIZES = 8


def check_layout(config: Config, degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for options that do not fit the degrees, the model, or each other.

    `model` may be on the meta device.
    """
    check_cuts(degrees, model)
    check_experts(degrees, model)
    check_sequences(config, degrees, model)
    check_pipeline(config, degrees, model)
    check_memory(config, degrees)
    check_qk_clip(config, model)


def check_cuts(degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for a model that tensor parallelism cannot cut evenly."""
    heads, kv_heads = model.heads
    sizes = {"attention heads": heads, "heads of keys and values": kv_heads, **cut_sizes(model)}
    for what, size in sizes.items():
        require(
            size % degrees.tp == 0,
            f"parallelism.tp = {degrees.tp} does not divide the {size} {what}: choose "
            + f"a divisor of {size}",
        )


def check_experts(degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for experts that the ranks cannot share, or whose products are slow."""
    require(
        degrees.ep == 1 or (model.experts > 0 and model.experts % degrees.ep == 0),
        f"parallelism.ep = {degrees.ep} does not divide the {model.experts} experts of each block: "
        f"choose a divisor of {model.experts}",
    )
    for name, mixture in model.routed().items():
        for parameter in mixture.experts.parameters():
            require(
                all(size % GROUPED_SIZES == 0 for size in parameter.shape[1:]),
                f"block {name} has matrices of {' x '.join(map(str, parameter.shape[1:]))}: "
                f"grouped products take sizes that are multiples of {GROUPED_SIZES}, so change "
                "model.n_expert_inner or model.n_embd",
            )


def check_sequences(config: Config, degrees: Degrees, model: Model) -> None:
    """Raise `UserError` for sequences that the ranks cannot cut evenly."""
    length, cp, tp = config.training.seq_len, degrees.cp, degrees.tp
    unit = sequence_unit(cp, tp)
    require(
        length % unit == 0,
        f"training.seq_len = {length} must be a multiple of {unit} for parallelism.cp = {cp} and "
        f"parallelism.tp = {tp}",
    )
    for heads in model.heads:
        require(
            config.parallelism.cp_method != "ulysses" or heads // tp % cp == 0,
            f"parallelism.cp = {cp} does not divide the {counted(heads // tp, 'head')} of each "
            f'rank: choose a divisor of {heads // tp}, or parallelism.cp_method = "all-gather"',
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


def check_memory(config: Config, degrees: Degrees) -> None:
    """Raise `UserError` for ways to save memory, to compile or to multiply that do not fit."""
    parallelism = config.parallelism
    require(
        config.training.float8.recipe == "none" or degrees.tp == 1,
        f"training.float8 does not go with parallelism.tp = {degrees.tp}: set parallelism.tp = 1",
    )
    if config.training.compile:
        problem = compile_problem(config, degrees.tp)
        require(problem is None, problem or "")
    shards, size = degrees.dp_shard * degrees.cp, parallelism.reshard_after_forward
    if isinstance(size, int):
        require(
            shards % size == 0,
            f"parallelism.reshard_after_forward = {size} does not divide the "
            f"{counted(shards, 'rank')} that "
            f'weights are sharded over: choose a divisor of {shards}, or "always"',
        )


def check_qk_clip(config: Config, model: Model) -> None:
    """Raise `UserError` for QK-clip where weights do not decide logits, or which do is unknown."""
    limit = config.training.qk_clip
    modules = [*model.blocks.modules()] if limit else []
    bounds = [each for each in (getattr(each, "logit_bound", "") for each in modules) if each]
    require(
        not limit or not bounds,
        f"training.qk_clip = {limit:g} has no meaning beside {''.join(bounds[:1])}, which bounds "
        "the logits of attention whatever the weights of queries and keys are: remove one of them",
    )
    require(
        not limit or any(getattr(each, "logit_rows", None) for each in modules),
        f"training.qk_clip = {limit:g} needs a model whose attention declares the rows of its "
        f"queries and keys (logit_rows), which a {type(model).__name__} does not: remove it",
    )
