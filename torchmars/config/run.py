"""The name of a run, its folder, and its seed."""

import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from torchmars.config.fields import Mark
from torchmars.core.bounds import Local, ModuleName, Name, Place, Range
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL

# Where a run writes in its folder, under names that anybody knows before.
FILES = ("lock", "events.jsonl", "output.log", f"*{PARTIAL}", "logs/*")
FOLDERS = ("logs", "hang", "profile", "tokenizer")
Modules = list[Annotated[str, ModuleName()]]


@dataclass(frozen=True)
class RunConfig:
    """The name of the run, and its folder."""

    name: Annotated[str, Local(), Name("folder")] = "run"
    """Name of the run. Its folder is FOLDER/NAME. A run found there is continued. Default with a
    config: the name of its first file, without .toml."""
    folder: Annotated[str, Place()] = "runs"
    """Folder that holds all runs."""
    plugins: Modules = field(default_factory=list)
    """Python modules of yours that register models, rules or kinds of data: docs/extending.md.
    Also --plugins A,B."""
    seed: Annotated[int, Range(0, 2**63 - 1), Mark.IDENTITY] = 0
    """Seed of the initial weights and of the data order."""

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return Path(self.folder) / self.name

    @property
    def tokenizer(self) -> Path:
        """The folder of a copy of the run's tokenizer, if that is a file."""
        return self.path / "tokenizer"

    @property
    def compile_cache(self) -> Path:
        """The folder where torch.compile keeps what it has compiled for the run."""
        return self.path / "compile_cache"

    @property
    def lock(self) -> Path:
        """The file that is locked while the run trains."""
        return self.path / "lock"

    @property
    def hang(self) -> Path:
        """The folder where ranks write where they stand once one of them hangs."""
        return self.path / "hang"

    def check_links(self) -> None:
        """Raise `UserError` for a link in the run's folder where the run writes.

        It may lead to files of somebody else. The folder itself may be a link.
        """
        folder = glob.escape(str(self.path))
        for name in (*FOLDERS, *FILES):
            for path in filter(os.path.islink, glob.iglob(f"{folder}/{name}")):
                raise UserError(f"{path} is a link, and the run writes there: remove it")
