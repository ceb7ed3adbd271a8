"""Optimizers that compete: the shipped ones by name, and a user's own files."""

from dataclasses import dataclass, field
from pathlib import Path

from torchmars.config.load import SHIPPED, Tables, read_toml
from torchmars.config.optimizer import OptimizerConfig
from torchmars.core.check import meant
from torchmars.core.errors import UserError
from torchmars.core.places import local_place

# The baseline if it takes part and --baseline names no other.
BASELINE = "adamw"


@dataclass(frozen=True)
class Contender:
    """An optimizer that takes part, or a size of the model."""

    name: str
    table: Tables
    """Its [optimizer] section. Values of the grid override it."""
    sections: Tables = field(default_factory=dict)
    """Other sections that are its own, whole."""

    @property
    def rule(self) -> str:
        """Its optimizer.name."""
        return str(self.table.get("name", OptimizerConfig.name))


def find_contenders(names: list[str]) -> list[Contender]:
    """Return the contenders of --optimizers. Raises `UserError` for an unknown name."""
    contenders = [find_contender(name) for name in names]
    found = [each.name for each in contenders]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--optimizers: two are called {twice}: name it once, or rename the file")
    return contenders


def find_baseline(name: str | None, contenders: list[Contender]) -> str | None:
    """Return the name of the contender of --baseline; None if none is named, nor the usual one.

    Raises `UserError` for one that does not take part.
    """
    names = [each.name for each in contenders]
    if name is None:
        return BASELINE if BASELINE in names else None
    found = name if name in names else name_of(Path(name))
    if found not in names:
        raise UserError(f"--baseline: {name!r} does not take part: name one of {', '.join(names)}")
    return found


def find_contender(name: str) -> Contender:
    """Return the contender that a name or a file stands for. Raises `UserError`."""
    shipped = {name_of(file): file for file in sorted((SHIPPED / "optimizers").glob("*.toml"))}
    name = str(local_place(name, "--optimizers"))
    if name in shipped:
        return Contender(name, read_toml(shipped[name])["optimizer"])
    if not name.endswith(".toml"):
        raise UserError(
            f"--optimizers: there is no {name!r}: "
            + meant(name, [*shipped], f"it may be {', '.join(shipped)}, or a TOML file ")
            + "with an [optimizer] section"
        )
    tables = read_toml(Path(name))
    table = tables.pop("optimizer", None)
    if not isinstance(table, dict):
        raise UserError(f"--optimizers: {name} has no [optimizer] section: write one")
    if tables:
        raise UserError(
            f"--optimizers: {name} has {', '.join(tables)} beside [optimizer]: all else must be "
            "the same for all, so move it to the config"
        )
    return Contender(name_of(Path(name)), table)


def name_of(file: Path) -> str:
    """Return the name of the contender of a file."""
    return file.stem.replace("_", "-")
