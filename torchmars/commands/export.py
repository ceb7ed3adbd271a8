"""`python -m torchmars.export RUN_OR_CHECKPOINT FILE.safetensors`: the weights alone.

Their names are those they have here. The same weights give the same file, byte for byte.
"""

from pathlib import Path

from safetensors import SafetensorError

from torchmars.checkpoint.inference import load_model
from torchmars.checkpoint.manifest import NAME
from torchmars.checkpoint.weights import write_weights
from torchmars.core.console import say
from torchmars.core.errors import Arguments, UserError, reported
from torchmars.core.files import misfit


def main() -> None:
    parser = Arguments(
        prog="python -m torchmars.export",
        description="Write the weights of a checkpoint, in float32, to a "
        ".safetensors file, which checkpoint.init_from reads.",
    )
    parser.add_argument(
        "folder", type=Path, help="a checkpoint, or a run, whose newest good checkpoint is taken"
    )
    parser.add_argument("file", type=Path, help="the .safetensors file to write")
    parser.add_argument("--force", action="store_true", help="replace the file if there is one")
    with reported():
        args = parser.parse_args()
        check_file(args.file, args.force)
        model, _, _ = load_model(args.folder)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        try:
            write_weights(weights, args.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {args.file}: {error}") from None
        count = sum(value.numel() for value in weights.values())
        say(f"{args.file}: {len(weights)} tensors, {count:,} weights")


def check_file(file: Path, force: bool) -> None:
    """Raise `UserError` where `file` must not be written, or only by `force`."""
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must be named *.safetensors")
    if wrong := misfit(file, "file"):
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
