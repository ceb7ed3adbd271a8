"""Versions and checksums of the JSON files that describe a checkpoint or a folder of data.

Such a file names its format, `torchmars-NAME-VERSION`. Its last entry is a checksum: the SHA-256
of the bytes of the same file without that entry. Whoever checks it need not know the other
entries. Every version keeps both, so that a file of another version is told from a damaged one. A
version reads its own files alone: any change makes a new one.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import tomli

from torchmars.core.check import make, parse_json
from torchmars.core.errors import UserError
from torchmars.core.files import open_file, read_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

CHECKSUM = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
CHECKSUM_SIZE = len(b',\n "sha256": ""\n}\n') + 64


class OtherVersion(UserError):
    """A file that another version wrote. It is not damaged."""


@dataclass(frozen=True)
class Format:
    """A kind of file."""

    name: str
    version: int
    """The only one that is written and read."""
    remedy: str
    """The remedy for a file of another version."""

    def text(self, entries: dict[str, Any]) -> str:
        """Return the text of a file with these entries, its format and its checksum."""
        entries = {"format": f"{self.name}-{self.version}"} | entries
        digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
        return json.dumps(entries | {"sha256": digest}, indent=1) + "\n"

    def read(
        self,
        path: PurePath,
        kind: type[T],
        open: Callable[[PurePath], BinaryIO] = open_file,
    ) -> T:
        """Return the contents of a file as a `kind`, a dataclass.

        Raises `OSError` if it cannot be read, `OtherVersion`, and `ValueError` if it is
        damaged.
        """
        content = read_bytes(path, open)
        entries = parse_json(content.decode())
        matches = checksum_matches(content)
        if matches is False:
            raise ValueError("it was altered: it does not match its own checksum")
        name = str(entries.get("format"))
        if not re.fullmatch(rf"{self.name}-[1-9][0-9]{{0,8}}", name):
            raise ValueError(f"its format is {name!r}")
        if name != f"{self.name}-{self.version}":
            raise OtherVersion(
                f"{path} is of format {name}, which this version cannot read: {self.remedy}"
            )
        if matches is None:
            raise ValueError("its checksum is missing")
        try:
            return make(
                kind,
                {each.name: entries[each.name] for each in fields(kind) if each.name in entries},
            )
        except UserError as error:
            raise ValueError(str(error)) from None


def checksum_matches(content: bytes) -> bool | None:
    """Return whether a file matches the checksum at its end; None if it has none."""
    last = CHECKSUM.fullmatch(content[-CHECKSUM_SIZE:])
    if last is None:
        return None
    without = content[:-CHECKSUM_SIZE] + b"\n}"
    return hashlib.sha256(without).hexdigest() == last[1].decode()


def __getattr__(name: str) -> str:
    """Return `__version__`, that of this package, also in a checkout that is not installed."""
    if name != "__version__":
        raise AttributeError(name)
    try:
        return metadata.version("torchmars")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        return str(tomli.loads(project.read_text(encoding="utf-8"))["project"]["version"])
