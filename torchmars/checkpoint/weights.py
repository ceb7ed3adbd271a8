"""Files of weights alone, in the safetensors format: writing, and reading into a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL
from torchmars.optim.state import fill


def check_shapes(
    source: Path, saved: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]
) -> None:
    """Raise `UserError` for one of `weights` that `source` lacks or has in another shape.

    `saved` are the shapes of the weights in `source`, by name.
    """
    for name, value in weights.items():
        if saved.get(name) != tuple(value.shape):
            found = f"in shape {list(saved[name])}" if name in saved else "not at all"
            raise UserError(
                f"checkpoint.init_from: {source} has {name} {found}, the config's model in "
                f"{list(value.shape)}: set [model], data.tokenizer and training.seq_len "
                "as they were there"
            )


@torch.no_grad()
def load_weights(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill `weights`, sharded or not, from a .safetensors file. Raises `UserError`.

    Every rank reads the file and keeps its part.
    """
    try:
        with safe_open(file, framework="pt") as saved:
            check_shapes(
                file,
                {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()},
                weights,
            )
            for name, target in weights.items():
                fill(target, saved.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint.init_from: cannot read {file}: {error}") from None


def write_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write `weights` to `file`, whole or not at all, with the mode that the umask gives.

    Raises `OSError` or `SafetensorError`.
    """
    partial = file.with_name(file.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        # One key of metadata: safetensors writes several in an order of chance.
        save_file(weights, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # safetensors 0.8 makes files that only their owner reads
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)
