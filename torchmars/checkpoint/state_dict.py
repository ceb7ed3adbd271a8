"""The tensors of a run: their names, which are the same on every layout, and loading them.

The saver writes them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import PurePath

import torch
from torch import Tensor

from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.reader import read_index, read_tensors
from torchmars.core.device import gpu_type
from torchmars.optim import MARS
from torchmars.optim.tensors import local_part, unwrapped
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel


def training_state(
    layout: Layout, model: ParallelModel, optimizer: MARS, average: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a run that this rank has a part of, by name.

    They are weights and a model's buffers, the moving average if there is one, what balances
    experts, optimizer state and this rank's RNG state.

    A flat dict can be read on another layout. Hyperparameters are not in it: they are the config's.
    """
    return (
        model_state(model.tensors)
        | average_state(average)
        | model.balance.state()
        | optimizer_state(optimizer)
        | {"skipped_steps": optimizer.skipped}
        | rng_state(layout.world.rank)
    )


def model_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their names in a checkpoint."""
    return {f"model.{name}": unwrapped(value) for name, value in weights.items()}


def average_state(average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the moving average of weights by its names in a checkpoint."""
    return {f"ema.{name}": value for name, value in average.items()}


def optimizer_state(optimizer: MARS) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by parameter and name."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named_parameters(optimizer).items()
        for key, value in optimizer.state[parameter].items()
    }


def optimizer_state_names(optimizer: MARS) -> dict[str, str]:
    """Return for each parameter, by name, its rule and the names of its state tensors."""
    return {
        name: " ".join([group["rule"], *sorted(optimizer.state[parameter])])
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }


def named_parameters(optimizer: MARS) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }


def rng_state(rank: int) -> dict[str, Tensor]:
    """Return the state of this process's default generators as bytes.

    They belong to the CPU and, if there is one, to the GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    if gpu := gpu_type():
        states[gpu] = torch.get_device_module(gpu).get_rng_state()
    return {f"rng.{place}.{rank}": state for place, state in states.items()}


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore the states among these that `rng_state` returned."""
    for name, value in state.items():
        if name.startswith("rng."):
            _, place, _ = name.split(".")
            (torch if place == "cpu" else torch.get_device_module(place)).set_rng_state(value)


def seed_rng(*what: int) -> None:
    """Seed the default generators by some numbers, such as seed, step and rank."""
    torch.manual_seed(
        int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big", signed=True)
    )


def load_copy(
    parts: Mapping[str, Tensor],
    manifest: CheckpointManifest,
    layout: Layout,
    model: ParallelModel,
    optimizer: MARS,
    average: Mapping[str, Tensor],
) -> None:
    """Load this rank's `parts`, by name, of a state. `manifest` has the rest of it.

    The random number generators are seeded again where their state is not among the parts.
    """
    state = training_state(layout, model, optimizer, average)
    state = {
        name: value for name, value in state.items() if name in parts or not name.startswith("rng.")
    }
    for name, tensor in state.items():
        local_part(tensor).copy_(parts[name])
    model.follow_weights()
    seed_rng(manifest.config["run"]["seed"], manifest.step, layout.world.rank)
    set_rng_state(state)


def load_checkpoint(
    folder: PurePath,
    manifest: CheckpointManifest,
    layout: Layout,
    model: ParallelModel,
    optimizer: MARS,
    average: Mapping[str, Tensor],
) -> bool:
    """Load the checkpoint `folder` into `model`, `optimizer` and `average` in place.

    Called by every rank, on any layout. The random number generators continue where the number of
    ranks is still the same, and are seeded again otherwise. Returns whether the checkpoint has an
    average; `average` is left as it is if not. Raises `DamagedCheckpoint` on every rank. Weights
    and state are then of no use until another load.
    """
    whole = training_state(layout, model, optimizer, average)
    index = layout.on_all(lambda: read_index(folder, manifest))
    saved = index.state_dict_metadata
    has_average = any(name.startswith("ema.") for name in saved)
    absent = ("rng.", "balance.") if has_average else ("rng.", "balance.", "ema.")
    state = {
        name: value for name, value in whole.items() if name in saved or not name.startswith(absent)
    }
    for name in whole.keys() - saved.keys():
        if name.startswith("balance."):  # as before the first step
            whole[name].zero_()
    layout.on_all(lambda: read_tensors(folder, state, index))
    model.follow_weights()
    seed_rng(manifest.config["run"]["seed"], manifest.step, layout.world.rank)
    if manifest.world_size == layout.world.size:
        set_rng_state(state)
    return has_average
