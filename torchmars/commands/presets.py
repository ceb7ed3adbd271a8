"""List published settings by name, with their rate, schedule, source and result."""

import re
import sys
from dataclasses import dataclass, field
from typing import Literal

from torchmars.config.load import ABOUT, SHIPPED, merge, read, read_toml
from torchmars.core.check import make
from torchmars.core.cli import parse
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
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
    `torchmars train gpt2-small-mars-m-openwebtext my.toml --training.steps 10000`. Its table
    [about] says more: the GPUs, and where sources disagree.
    """


def main() -> None:
    """Print a table of all presets."""
    with exit_on_user_error():
        parse(Presets, sys.argv[1:], "torchmars presets")
        say(*table([HEADINGS, *(preset_row(*each) for each in read_presets().items())]))


def read_presets() -> dict[str, About]:
    """Return what is known of all presets, by name. Raises `UserError`."""
    files = sorted((SHIPPED / "presets").glob("*.toml"))
    return {each.stem: make(About, read_toml(each)[ABOUT], f"in {each}", ABOUT) for each in files}


def preset_row(name: str, about: About) -> tuple[str, ...]:
    """Return the cells of a preset."""
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
