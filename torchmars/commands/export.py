"""Write the weights of a checkpoint for other programs."""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from torchmars.config.fields import Count, Positive
from torchmars.config.plugins import PluginOptions
from torchmars.core.console import next_commands, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.words import counted
from torchmars.data.manifest import has_manifest
from torchmars.storage.storage import MANIFEST

if TYPE_CHECKING:
    from torchmars.exchange.saved_model import SavedModel


LOADING = {
    "hf": 'transformers.AutoModelForCausalLM.from_pretrained("{target}")',
    "safetensors": 'safetensors.torch.load_file("{target}")',
}
# Endings of files in other formats: a folder of such a name would be taken for one.
OTHER_FILES = ".pt .pth .bin .ckpt .pkl .npz .h5 .onnx .gguf .safetensor".split()


@dataclass
class Export(PluginOptions):
    """Write the weights of a checkpoint for other programs.

    --to hf: a folder that AutoModelForCausalLM.from_pretrained and AutoTokenizer of Hugging Face's
    transformers load. --to safetensors: one file of weights under the names of the model's own
    parameters. The same weights give the same files, byte for byte. checkpoint.init_from reads
    both.
    """

    run: Positional[PurePath]
    """A run, whose newest good checkpoint is taken, or a checkpoint."""
    target: Positional[Path]
    """The folder or the .safetensors file to write."""
    to: Literal["hf", "safetensors"] | None = None
    """The format. Default: safetensors if the target is named *.safetensors, else hf."""
    step: Count | None = None
    """Of a run, take the checkpoint of this step."""
    average: Positive = 1
    """Of a run, take the mean of the last so many checkpoints."""
    ema: bool = False
    """Take the moving average of the weights, of a run with training.ema_decay."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the written weights."""
    force: bool = False
    """Replace a file that is there."""


def main() -> None:
    """Export the model that the command line names."""
    with exit_on_user_error():
        options = parse(Export, sys.argv[1:], "torchmars export")
        kind = options.to or ("safetensors" if options.target.suffix == ".safetensors" else "hf")
        check_target(options.target, kind, options.force)
        from torchmars.exchange import export, saved_model

        models = saved_model.open_last(options.run, options.step, options.average, options.ema)
        export.export(models, options.target, kind, options.dtype)
        newest = models[0]
        parameters = [parameter.numel() for parameter in newest.model.parameters()]
        say(f"{options.target}: {counted(len(parameters), 'tensor')}, {sum(parameters):,} weights")
        loss = newest.manifest.validation_loss
        measured = "" if loss is None else f", validation loss {loss:.4f}"
        say(f"of {newest.folder}, step {newest.step:,}{measured}")
        if kind == "hf" and (problem := export.tokenizer_problem(newest)):
            say(f"warning: {problem}")
        say(f"Python: {LOADING[kind].format(target=str(options.target))}")
        following = after_folder if kind == "hf" else after_file
        if lines := next_commands(*following(options.target, newest)):
            say(*lines)


def after_folder(target: Path, model: "SavedModel") -> list[list[str]]:
    """Return commands that may come after an export to a folder."""
    commands = [["torchmars", "generate", str(target), "--prompt", "The"]]
    shards = model.config.data.corpora()[0].path
    if has_manifest(Path(shards)):
        commands.append(["torchmars", "evaluate", str(target), "--shards", shards])
    return commands


def after_file(target: Path, model: "SavedModel") -> list[list[str]]:
    """Return the command that trains a new run from a file of weights, if its config is there."""
    run, name = model.folder.parent.parent, f"{model.config.run.name}-next"
    config = Path(run / "config.toml")
    if not config.is_file():
        return []
    new = ["--run.name", name, "--checkpoint.init_from", str(target)]
    return [["torchmars", "train", str(config), *new]]


def check_target(target: Path, kind: Literal["hf", "safetensors"], force: bool) -> None:
    """Raise `UserError` if `target` must not be written, or only by `force`."""
    what: Literal["file", "folder"] = "folder" if kind == "hf" else "file"
    if kind == "safetensors" and target.suffix != ".safetensors":
        raise UserError(f"{target} must be named *.safetensors")
    if target.suffix.lower() in OTHER_FILES:
        raise UserError(
            f"{target}: name a file of weights *.safetensors, or a folder of transformers "
            f"without {target.suffix}"
        )
    if wrong := path_problem(target, what):
        raise UserError(
            f"cannot write {target}: {wrong}: name a new {what}, or a file to replace with --force"
        )
    for folder in target.resolve().parents:
        if (folder / MANIFEST).exists() and (folder / ".metadata").exists():
            raise UserError(
                f"{target} would lie in the checkpoint {folder}, which takes foreign "
                "files for damage: write it elsewhere"
            )
    if target.exists() and (kind == "hf" or not force):
        remedy = "" if kind == "hf" else ", or replace it with --force"
        raise UserError(f"{target} exists: name another {what}{remedy}")
