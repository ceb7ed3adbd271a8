"""List the presets: published settings by name, with cost and expected result."""

import sys
from dataclasses import dataclass

from torchmars.config.presets import read_presets
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.help import Positional
from torchmars.core.options import parse
from torchmars.core.places import local_place
from torchmars.core.typed import meant


@dataclass
class Presets:
    """List the presets: published settings by name, with cost and expected result.

    A preset is called FAMILY-SIZE-RULE-DATA. Its name goes where a config file goes:
    `CONFIG_FILE=gpt2-small-mars-m-openwebtext ./run_train.sh`, or
    `torchmars train gpt2-small-mars-m-openwebtext my.toml --training.steps 10000`.
    """

    name: Positional[str | None] = None
    """A preset to describe in full: its settings, their source, and disagreements of sources.
    Default: a table of all."""
    family: str | None = None
    """Only the presets of this family: gpt2, llama or qwen3."""


def main() -> None:
    """Print the presets that the command line asks for."""
    with exit_on_user_error():
        options = parse(Presets, sys.argv[1:], "torchmars presets")
        local_place(options.name or "", "NAME")
        presets = read_presets()
        families = list(dict.fromkeys(preset.family for preset in presets.values()))
        if options.name is not None and options.name not in presets:
            raise UserError(
                f"there is no preset {options.name}: "
                f"{meant(options.name, list(presets))}torchmars presets lists them"
            )
        if options.family is not None and options.family not in families:
            raise UserError(f"--family must be one of {', '.join(families)}, got {options.family}")
        # It brings torch, which mistakes need not wait for.
        from torchmars.planning.preset_pages import preset_page, preset_table

        if options.name is not None:
            say(*preset_page(presets[options.name]))
        else:
            shown = families if options.family is None else [options.family]
            say(*preset_table(each for each in presets.values() if each.family in shown))
