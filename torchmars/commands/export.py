"""Write the weights of a checkpoint to a .safetensors file."""

import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from tyro.conf import Positional

from torchmars.checkpoint.inference import load_model
from torchmars.checkpoint.manifest import NAME
from torchmars.checkpoint.weights import write_weights
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.options import parse


@dataclass
class Export:
    """Write the weights of a checkpoint, in float32, to a .safetensors file.

    checkpoint.init_from reads it. Names are those of the model's parameters. The same weights give
    the same file, byte for byte.
    """

    folder: Positional[Path]
    """A checkpoint, or a run, whose newest good checkpoint is taken."""
    file: Positional[Path]
    """The .safetensors file to write."""
    force: bool = False
    """Replace the file if there is one."""


def main() -> None:
    """Write the file that the command line names."""
    with exit_on_user_error():
        options = parse(Export, sys.argv[1:], "torchmars export")
        check_file(options.file, options.force)
        model, _, _ = load_model(options.folder)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        try:
            write_weights(weights, options.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {options.file}: {error}") from None
        count = sum(value.numel() for value in weights.values())
        say(f"{options.file}: {len(weights)} tensors, {count:,} weights")


def check_file(file: Path, force: bool) -> None:
    """Raise `UserError` if `file` must not be written, or only by `force`."""
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must be named *.safetensors")
    if wrong := path_problem(file, "file"):
        raise UserError(
            f"cannot write {file}: {wrong}: name a new file, or one to replace with --force"
        )
    for folder in file.resolve().parents:
        if (folder / NAME).exists() and (folder / ".metadata").exists():
            raise UserError(
                f"{file} would lie in the checkpoint {folder}, which takes foreign "
                "files for damage: write it elsewhere"
            )
    if file.exists() and not force:
        raise UserError(f"{file} exists: name another file, or replace it with --force")


if __name__ == "__main__":
    main()
