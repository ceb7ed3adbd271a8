"""`python -m torchmars.export RUN_OR_CHECKPOINT FILE.safetensors`: the weights alone, under the names they have here."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from torchmars.console import say
from torchmars.errors import Arguments, UserError, reported
from torchmars.files import misfit
from torchmars.generate import load


def main() -> None:
    parser = Arguments(prog="python -m torchmars.export",
                       description="Write the weights of a checkpoint, in float32, to a "
                       ".safetensors file, which checkpoint.init_from reads.")
    parser.add_argument("folder", type=Path, help="a checkpoint, or a run, whose newest good checkpoint is taken")
    parser.add_argument("file", type=Path, help="the .safetensors file to write")
    with reported():
        args = parser.parse_args()
        if args.file.suffix != ".safetensors":
            raise UserError(f"{args.file} must be named *.safetensors")
        if wrong := misfit(args.file, "file"):
            raise UserError(f"cannot write {args.file}: {wrong}: name another file")
        model, _, config = load(args.folder)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        try:
            save_file(weights, args.file, metadata={"format": "pt", "model": f"{config.model.name} {config.model.size}"})
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {args.file}: {error}") from None
        count = sum(value.numel() for value in weights.values())
        say(f"{args.file}: {len(weights)} tensors, {count:,} weights")


if __name__ == "__main__":
    main()
