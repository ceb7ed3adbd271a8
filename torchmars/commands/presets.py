"""List published settings by name, with their cost and expected result."""

import sys
from dataclasses import dataclass
from typing import Literal

from torchmars.config.presets import read_presets
from torchmars.core.check import meant
from torchmars.core.cli import Positional, parse
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.places import local_place


@dataclass
class Presets:
    """List published settings by name, with their cost and expected result.

    A preset is a file of train_configs/presets, FAMILY-SIZE-RULE-DATA.toml. Its name goes where a
    config file goes: `CONFIG_FILE=gpt2-small-mars-m-openwebtext ./run_train.sh`, or
    `torchmars train gpt2-small-mars-m-openwebtext my.toml --training.steps 10000`.
    """

    name: Positional[str | None] = None
    """A preset to describe in full: its settings, their source, and disagreements of sources.
    Default: a table of all."""
    family: Literal["gpt2", "llama"] | None = None
    """Only the presets of this family."""


def main() -> None:
    """Print the presets that the command line asks for."""
    with exit_on_user_error():
        options = parse(Presets, sys.argv[1:], "torchmars presets")
        local_place(options.name or "", "NAME")
        presets = read_presets()
        if options.name is not None and options.name not in presets:
            raise UserError(
                f"there is no preset {options.name}: "
                f"{meant(options.name, list(presets))}torchmars presets lists them"
            )
        # It brings torch, which mistakes need not wait for.
        from torchmars.planning.preset_pages import preset_page, preset_table

        if options.name is not None:
            say(*preset_page(presets[options.name]))
        else:
            shown = options.family
            say(*preset_table(each for each in presets.values() if shown in (None, each.family)))
