"""Write the weights of a checkpoint for other programs."""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from torchmars.config.fields import Count
from torchmars.config.plugins import PluginOptions
from torchmars.core.cli import Positional, parse
from torchmars.core.console import next_commands, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import path_problem
from torchmars.core.words import counted


@dataclass
class Export(PluginOptions):
    """Write the weights of a checkpoint for other programs, to a new folder.

    --to hf: one that AutoModelForCausalLM.from_pretrained and AutoTokenizer of Hugging Face's
    transformers load. --to safetensors: weights alone, under the names of the model's own
    parameters. Both have model.safetensors, or several files of at most 5 GB and their index. The
    same weights give the same files, byte for byte. checkpoint.init_from reads both.
    """

    run: Positional[PurePath]
    """A run, whose newest good checkpoint is taken, or a checkpoint."""
    target: Positional[Path]
    """The folder to write."""
    to: Literal["hf", "safetensors"] = "hf"
    """Whose names the weights get."""
    step: Count | None = None
    """Of a run, take the checkpoint of this step."""
    ema: bool = False
    """Take the moving average of the weights, of a run with training.ema_decay."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the written weights."""


def main() -> None:
    """Export the model that the command line names."""
    with exit_on_user_error():
        options, _ = parse(Export, sys.argv[1:], "torchmars export")
        target = options.target
        check_target(target)
        from torchmars.exchange import export, saved_model

        saved = saved_model.open_model(options.run, options.step, options.ema)
        export.export(saved, target, options.to, options.dtype)
        parameters = [parameter.numel() for parameter in saved.model.parameters()]
        say(f"{target}: {counted(len(parameters), 'tensor')}, {sum(parameters):,} weights")
        loss = saved.manifest.validation_loss
        measured = "" if loss is None else f", validation loss {loss:.4f}"
        say(f"of {saved.folder}, step {saved.manifest.step:,}{measured}")
        if options.to == "hf":
            if getattr(saved.model.args, "qkv_bias", False):
                told = "AutoTokenizer of transformers 5 reads the tokenizer of a qwen2 model"
                say(f"warning: {told} in its own way: load it by PreTrainedTokenizerFast")
            say(f'Python: transformers.AutoModelForCausalLM.from_pretrained("{target}")')
            say(*next_commands(["torchmars", "generate", str(target), "--prompt", "The"]))


def check_target(target: Path) -> None:
    """Raise `UserError` if `target` must not be written."""
    wrong = path_problem(target, "folder") or "it exists" * target.exists()
    if wrong or any((each / ".metadata").exists() for each in target.resolve().parents):
        wrong = wrong or "it would damage the checkpoint that it is in"
        raise UserError(f"cannot write {target}: {wrong}: name a new folder")
