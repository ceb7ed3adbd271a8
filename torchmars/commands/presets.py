"""List published settings by name, with their rate, schedule, source and result."""

import re
import sys
from dataclasses import dataclass, field
from typing import Literal

from torchmars.config.load import ABOUT, SHIPPED, merge, read, read_toml
from torchmars.core.check import make, meant
from torchmars.core.cli import Positional, parse
from torchmars.core.console import labelled, next_commands, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.words import counted, short, table

HEADINGS = ("preset", "rate", "schedule", "tokens", "settings", "source", "result")


@dataclass(frozen=True)
class About:
    """The table [about] of a preset's file."""

    gpus: int
    layout: str
    """Whose layout `gpus` is: "published: ..." or "assumed"."""
    origin: Literal["published", "partly"]
    """Whether all settings that matter were published, or some of them."""
    source: str
    """Where they were published."""
    result: str = "none published"
    """The result to expect."""
    notes: list[str] = field(default_factory=list)
    """Disagreements of the sources, and other notes."""


@dataclass
class Presets:
    """List published settings by name, with their rate, schedule, source and result.

    A preset is a file of train_configs/presets, FAMILY-SIZE-RULE-DATA.toml. Its name goes where a
    config file goes: `CONFIG_FILE=gpt2-small-mars-m-openwebtext ./run_train.sh`, or
    `torchmars train gpt2-small-mars-m-openwebtext my.toml --training.steps 10000`.
    """

    name: Positional[str | None] = None
    """A preset to describe in full: its source, and disagreements of sources. Default: a table of
    all."""
    family: Literal["gpt2", "llama"] | None = None
    """Only the presets of this family."""


def main() -> None:
    """Print the presets that the command line asks for."""
    with exit_on_user_error():
        options = parse(Presets, sys.argv[1:], "torchmars presets")
        presets = read_presets()
        if options.name is None:
            shown = [each for each in presets if each.startswith(options.family or "")]
            say(*table([HEADINGS, *(preset_row(each, presets[each]) for each in shown)]))
        elif options.name in presets:
            say(*preset_page(options.name, presets[options.name]))
        else:
            remedy = meant(options.name, presets, "torchmars presets lists them")
            raise UserError(f"there is no preset {options.name}: {remedy}")


def read_presets() -> dict[str, About]:
    """Return what is known of all presets, by name. Raises `UserError`."""
    files = sorted((SHIPPED / "presets").glob("*.toml"))
    return {each.stem: make(About, read_toml(each)[ABOUT], f"in {each}", ABOUT) for each in files}


def preset_row(name: str, about: About) -> tuple[str, ...]:
    """Return the cells of a preset in a table of all."""
    tables = merge(read([name]))
    training, schedule = tables["training"], tables["schedule"]
    warmup = counted(schedule["warmup_steps"], "step")
    source = re.search(r"arXiv \d+\.\d+", about.source)
    return (
        name,
        f"{tables['optimizer']['lr']:g}",
        f"{schedule['name']} to {schedule['min_lr']:g} after {warmup}",
        short(training["global_batch_size"] * training["seq_len"] * training["steps"]),
        about.origin,
        source[0] if source else about.source,
        about.result,
    )


def preset_page(name: str, about: About) -> list[str]:
    """Return what is known of a preset, in lines."""
    _, rate, schedule, tokens, *_ = preset_row(name, about)
    sections = {
        "preset": [name],
        "rate": [f"{rate}, {schedule}, {tokens} tokens"],
        "settings": [f"{about.origin}: {about.source}"],
        "result": [about.result],
        "GPUs": [f"{about.gpus}, {about.layout}"],
        "notes": about.notes,
    }
    return [
        *(line for title, section in sections.items() for line in labelled(title, *section)),
        *next_commands(
            ["torchmars", "config", name],
            ["torchmars", "plan", name, "--world-size", str(about.gpus)],
            ["torchmars", "train", name],
        ),
    ]
