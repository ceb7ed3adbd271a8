"""Where a new run's weights come from instead of random numbers: another run's checkpoint, or exported weights."""

from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchmars.checkpoint.former import current_names
from torchmars.checkpoint.manifest import Manifest
from torchmars.checkpoint.resume import open_newest
from torchmars.checkpoint.state import (
    model_state,
    named_parameters,
    optimizer_state,
    optimizer_state_names,
    read_state,
    saved_shapes,
)
from torchmars.console import say
from torchmars.errors import UserError
from torchmars.optim import MARS
from torchmars.optim.rules import state_fits
from torchmars.parallel.mesh import Layout


def init_from(
    source: Path, with_optimizer: bool, layout: Layout, model: nn.Module, optimizer: MARS
) -> tuple[str, list[Tensor]]:
    """Fill `model`, and `with_optimizer` the state that `optimizer` shares with the source's, from `source`: a run, whose newest good checkpoint
    is taken, a checkpoint, or a .safetensors file. Called by every rank.

    Returns what was taken, in words, and the parameters whose state came without the last gradient that their rule keeps. Raises `UserError`.
    """
    if source.suffix == ".safetensors":
        if with_optimizer:
            raise UserError(
                f"checkpoint.init_optimizer: {source} holds weights only: name a run or a checkpoint in checkpoint.init_from"
            )
        layout.agree(lambda: load_weights(source, model))
        return f"weights of {source}", []
    folder, manifest = layout.on_first(lambda: open_source(source, "full"))
    saved = layout.on_first(lambda: saved_shapes(folder))
    state = model_state(model)
    check_shapes(
        folder,
        {
            name.removeprefix("model."): size
            for name, size in saved.items()
            if name.startswith("model.")
        },
        model,
    )
    taken = without = []
    if with_optimizer:
        taken, without = shared_state(optimizer, manifest.optimizer)
        names = current_names(manifest.optimizer)
        there = {f"optimizer.{name}.{key}" for name in taken for key in names[name].split()[1:]}
        state |= {
            name: value for name, value in optimizer_state(optimizer).items() if name in there
        }
    read_state(folder, manifest, model, state, saved, layout.control)
    said = f"weights of {folder}"
    if with_optimizer:
        said += f", and the optimizer's state of {len(taken)} of {len(manifest.optimizer)} tensors"
        said += f" ({len(without)} without a last gradient)" if without else ""
    parameters = named_parameters(optimizer)
    return said, [parameters[name] for name in without]


def open_source(source: Path, level: Literal["full", "size"]) -> tuple[Path, Manifest]:
    """The checkpoint that checkpoint.init_from means. Raises `UserError`."""
    try:
        return open_newest(source, say, level)
    except UserError as error:
        raise UserError(f"checkpoint.init_from: {error}") from None


def shared_state(optimizer: MARS, saved: dict[str, str]) -> tuple[list[str], list[str]]:
    """The parameters whose state can be taken from another optimizer's, and those of them that lack the last gradient, by name.

    `saved` is a manifest's `optimizer`.
    """
    taken, without = [], []
    saved = current_names(saved)
    for name, wanted in optimizer_state_names(optimizer).items():
        rule, *needed = wanted.split()
        saved_rule, *there = saved.get(name, "").split() or ["none"]
        if state_fits(rule, needed, saved_rule, there):
            taken.append(name)
            if set(needed) - set(there):
                without.append(name)
    return taken, without


def check_shapes(source: Path, saved: dict[str, tuple[int, ...]], model: nn.Module) -> None:
    """Raise `UserError` naming the first weight of `model` that `source` has not, or has in another shape."""
    for name, value in model.state_dict().items():
        if saved.get(name) != tuple(value.shape):
            found = f"in shape {list(saved[name])}" if name in saved else "not at all"
            raise UserError(
                f"checkpoint.init_from: {source} has {name} {found}, the config's model in {list(value.shape)}: "
                "set [model], data.tokenizer and training.seq_len as they were there"
            )


@torch.no_grad()
def load_weights(file: Path, model: nn.Module) -> None:
    """Fill `model`, sharded or not, from a .safetensors file; every rank keeps its part. Raises `UserError`."""
    try:
        with safe_open(file, framework="pt") as weights:
            check_shapes(
                file,
                {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()},
                model,
            )
            for name, target in model.state_dict().items():
                whole = weights.get_tensor(name).to(target.device, target.dtype)
                if isinstance(target, DTensor):
                    whole = distribute_tensor(
                        whole, target.device_mesh, target.placements, src_data_rank=None
                    )
                target.copy_(whole)
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint.init_from: cannot read {file}: {error}") from None
