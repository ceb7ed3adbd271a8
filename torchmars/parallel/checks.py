"""What does not go together in a layout: found before there are ranks."""

from torchmars.config import Config, Degrees
from torchmars.config.fields import require


def check_layout(config: Config, degrees: Degrees) -> None:
    """Raise `UserError` for options that do not fit the degrees, or each other."""
    parallelism = config.parallelism
    require(
        not (config.training.compile and parallelism.splits_backward),
        f"training.compile does not go with parallelism.pp_schedule = "
        f'"{parallelism.pp_schedule}", which splits the backward pass: choose "1F1B" or '
        '"Interleaved1F1B", or do not compile',
    )
    # torch fails with "selective". With "full" it computes a block up to eight times: once more for
    # each of its weights.
    require(
        config.activation_checkpoint.mode == "none" or not parallelism.splits_backward,
        f'activation_checkpoint.mode = "{config.activation_checkpoint.mode}" does not go with '
        f'parallelism.pp_schedule = "{parallelism.pp_schedule}", which splits the backward pass: '
        'choose "1F1B" or "Interleaved1F1B"',
    )
    # torch 2.13 fails: of a block without a tensor to keep, it keeps the mesh.
    require(
        not (
            config.activation_checkpoint.mode == "full"
            and config.training.compile
            and degrees.tp > 1
        ),
        'activation_checkpoint.mode = "full" does not go with training.compile and '
        f'parallelism.tp = {degrees.tp}: choose "selective"',
    )
    shards, size = degrees.dp_shard * degrees.cp, parallelism.reshard_after_forward
    if isinstance(size, int):
        require(
            shards % size == 0,
            f"parallelism.reshard_after_forward = {size} does not divide the {shards} ranks that "
            'weights are sharded over: choose a divisor, or "always"',
        )
