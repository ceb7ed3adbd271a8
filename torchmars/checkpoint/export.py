"""Weights of checkpoints, written for other programs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchmars.checkpoint.card import model_card
from torchmars.checkpoint.huggingface import CONFIG, write_weight_files
from torchmars.checkpoint.inference import SavedModel
from torchmars.checkpoint.weights import write_weights
from torchmars.core.files import PARTIAL, remove, sync_folder, write_durably
from torchmars.models.huggingface import to_config


def mean_weight(models: Sequence[SavedModel]) -> Callable[[str], Tensor]:
    """Return a function from a weight's name to its mean over `models`.

    It holds two tensors of that weight in memory, no more.
    """

    def read(name: str) -> Tensor:
        total = models[0].read(name)
        for model in models[1:]:
            total += model.read(name)
        return total.div_(len(models))

    return read


def export_file(models: Sequence[SavedModel], file: Path, dtype: torch.dtype) -> None:
    """Write the mean weights of `models`, under our names, to a .safetensors file.

    Raises `OSError` and `DamagedCheckpoint`.
    """
    names = [name for name, _ in models[0].model.named_parameters()]
    read = mean_weight(models)
    entries = {name: (dtype, models[0].model.get_parameter(name).shape) for name in names}
    write_weights(file, entries, map(read, names))


def export_folder(models: Sequence[SavedModel], folder: Path, dtype: torch.dtype) -> None:
    """Write the mean weights of `models` to a folder that transformers loads.

    It appears when it is complete. Raises `OSError`, `DamagedCheckpoint`, and `UserError` for a
    shape that no class of transformers has.
    """
    newest = models[0]
    config = to_config(newest.model) | {"dtype": str(dtype).removeprefix("torch.")}
    partial = folder.with_name(folder.name + PARTIAL)
    if partial.exists():
        remove(partial)
    partial.mkdir(parents=True)
    write_durably(partial / CONFIG, json.dumps(config, indent=2) + "\n")
    write_durably(partial / "README.md", model_card(models))
    write_weight_files(partial, newest.model, dtype, mean_weight(models))
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
