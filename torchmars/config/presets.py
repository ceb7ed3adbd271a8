"""Presets: names for merges of config files and a few settings that the merge needs.

`train_configs/presets/FAMILY.toml` has a family's presets. Each is called FAMILY-SIZE-RULE-DATA. It
merges FAMILY_SIZE.toml, the rule's file of optimizers/, data/DATA.toml and the settings of its row.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchmars.config.toml_files import (
    SHIPPED,
    NamedTables,
    Tables,
    nearest_config,
    read_sources,
    read_toml,
)
from torchmars.core.errors import UserError
from torchmars.core.places import local_place
from torchmars.core.typed import question

# The settings of a row belong to [optimizer], except for these.
SECTIONS = {"min_lr": "schedule"}
# Where settings are from: all that matter were published, some of them, or none.
ORIGINS = ("published", "partly", "ours")


@dataclass(frozen=True)
class Preset:
    """A name for a merge of config files, and its facts."""

    name: str
    family: str
    files: tuple[str, ...]
    """The files that are merged, in order."""
    settings: Tables
    """The settings that the preset adds to them."""
    gpus: int
    layout: str
    """Whose layout `gpus` is: "published: ..." or "assumed: ..."."""
    origin: str
    """One of ORIGINS."""
    origin_text: str
    """Where the settings were published, or the source of our starting point."""
    result: str | None
    """The result to expect; None if none was published."""
    notes: tuple[str, ...]
    """Disagreements of the sources, and other notes."""
    references: tuple[str, ...]
    """The meanings of [1], [2] and so on."""

    @property
    def layout_published(self) -> bool:
        """Whether `gpus` is the number of a published run."""
        return self.layout.startswith("published")

    def sources(self) -> list[NamedTables]:
        """Return the tables that are merged, and where each is from."""
        found = [source for file in self.files for source in read_sources(file)]
        return [*found, (f"in the preset {self.name}", self.settings)]


def find_sources(name: str) -> list[NamedTables]:
    """Return the tables of a name on a command line: a file or a preset.

    A file of that name comes first. Raises `UserError`.
    """
    name = str(local_place(name, "the name of a config"))
    is_file = os.path.lexists(name) or os.path.isfile(SHIPPED / name)
    if is_file or name.endswith(".toml") or os.sep in name or "-" not in name:
        return read_sources(name)
    if name in read_presets():
        return read_presets()[name].sources()
    raise UserError(
        f"cannot read the config {name}: there is no such file or preset: "
        + question(nearest_config(Path(name), read_presets()), "see torchmars presets")
    )


@cache
def read_presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of their tables."""
    files = sorted((SHIPPED / "presets").glob("*.toml"))
    presets = [preset for file in files for preset in presets_of(file.stem, read_toml(file))]
    return {preset.name: preset for preset in presets}


def presets_of(family: str, table: Tables) -> list[Preset]:
    """Return the presets of a family's table."""
    return [
        make_preset(family, table, size, rule, data)
        for size in table["sizes"]
        for rule in table["rules"]
        for data in table["data"]
    ]


def make_preset(family: str, table: Tables, size: str, rule: str, data: str) -> Preset:
    """Return the preset of a size, rule and data: its tables' settings, the most special last."""
    layout, own = table["sizes"][size], table["rules"][rule]
    base: Tables = table["rules"][own["like"]] if "like" in own else {}
    row: Tables = base.get(size, {}) | own.get(size, {}) | own.get(data, {}).get(size, {})
    said = row if set(ORIGINS) & set(row) else own
    [origin] = set(ORIGINS) & set(said)
    name = f"{family}-{size}-{rule}-{data}"
    settings: Tables = {"run": {"name": name}, "optimizer": dict(own.get("set", {}))}
    for key, value in row.items():
        if key not in (*ORIGINS, "result"):
            settings.setdefault(SECTIONS.get(key, "optimizer"), {})[key] = value
    notes = [
        note["text"]
        for note in table["notes"]
        if size in note.get("sizes", [size]) and rule in note.get("rules", [rule])
    ]
    return Preset(
        name,
        family,
        (
            f"{family}_{size}.toml",
            f"optimizers/{own.get('file', rule)}.toml".replace("-", "_"),
            f"data/{data}.toml".replace("-", "_"),
        ),
        settings,
        layout["gpus"],
        layout["layout"],
        origin,
        said[origin],
        row.get("result"),
        tuple(notes),
        tuple(table["sources"]),
    )
