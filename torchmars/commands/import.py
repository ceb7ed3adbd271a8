"""Write a config that trains on from a model of Hugging Face's transformers."""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

import tomli_w

from torchmars.config.plugins import PluginOptions
from torchmars.core.cli import Positional, parse, words
from torchmars.core.console import next_commands, say
from torchmars.core.errors import UserError, exit_on_user_error, file_errors
from torchmars.core.files import path_problem, write_durably

REMEDY = "set data.tokenizer to the one that the model was trained with, else it is bytes"


@dataclass
class Import(PluginOptions):
    """Write a config that trains on from a model of Hugging Face's transformers.

    The folder is one that save_pretrained wrote, or that was downloaded, with .safetensors files.
    hf:NAME is a model of the hub. It is one of these: GPT-2, Llama, Mistral, Ministral, SmolLM3,
    OLMo 3, Qwen2, Qwen3, Qwen3-MoE, Mixtral, GLM-4.5, DeepSeek-V3 and GLM-4.7-Flash.

    It is checked, and stays where it is. A model of the hub stays in the hub's own cache. Each rank
    of a run reads its own part of the weights there. Files that are named after the config, and
    --section.key value overrides, change what they like.
    """

    folder: Positional[PurePath]
    """The folder of the model, or hf:NAME or hf:NAME@REVISION."""
    config: Positional[Path]
    """The TOML file to write."""


def main() -> None:
    """Write the config that the command line names."""
    with exit_on_user_error():
        options, _ = parse(Import, sys.argv[1:], "torchmars import")
        wrong = path_problem(options.config, "file") or "it exists" * options.config.exists()
        if wrong:
            raise UserError(f"cannot write {options.config}: {wrong}: name a new file")
        from torchmars.exchange.saved_model import open_folder

        found = open_folder(options.folder)
        tables = found.tables
        if options.plugins is not None:
            tables = {"run": {"plugins": words(options.plugins, "--plugins")}} | tables
        untold = "" if "data" in tables else f"{options.folder} has no tokenizer.json: {REMEDY}"
        with file_errors(f"cannot write {options.config}"):
            text = f"# {untold}.\n" if untold else ""
            write_durably(options.config, text + tomli_w.dumps(tables))
        say(f"{options.config}: {found.model.describe()}")
        if untold:
            say(f"warning: {untold}", error=True)
            return
        plugins = [] if options.plugins is None else ["--plugins", options.plugins]
        sample = ["torchmars", "generate", str(options.folder), "--prompt", "The", *plugins]
        say(*next_commands(sample, ["torchmars", "train", str(options.config)]))
