"""Presets: config files with settings that were published, and what is known of them."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from torchmars.config.load import ABOUT, EXTENDS, SHIPPED, read_toml
from torchmars.core.check import make


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
    result: str | None = None
    """The result to expect; None if none was published."""
    notes: list[str] = field(default_factory=list)
    """Disagreements of the sources, and other notes."""


@dataclass(frozen=True)
class Preset:
    """A config file of train_configs/presets, which goes by its name without `.toml`."""

    name: str
    files: list[str]
    """The files that it extends, in order."""
    about: About

    @property
    def family(self) -> str:
        """The family of its model."""
        return self.name.partition("-")[0]


@cache
def read_presets() -> dict[str, Preset]:
    """Return all presets by name."""
    found = [preset_of(file) for file in sorted((SHIPPED / "presets").glob("*.toml"))]
    return {preset.name: preset for preset in found}


def preset_of(file: Path) -> Preset:
    """Return the preset of a file. Raises `UserError` for one without [about]."""
    tables = read_toml(file)
    about = make(About, tables.get(ABOUT, {}), f"in {file}", ABOUT)
    return Preset(file.stem, tables[EXTENDS], about)
