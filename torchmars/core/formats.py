"""Versions and checksums of the JSON files that describe a checkpoint or a folder of data.

Such a file names its format, `torchmars-NAME-VERSION`. Its last entry is a checksum: the SHA-256
of the bytes of the same file without that entry. Every version keeps both, so that a file of
another version is told from a damaged one. A version reads its own files alone.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, BinaryIO, TypeVar, cast

from torchmars.core.check import make, parse_json
from torchmars.core.errors import UserError
from torchmars.core.files import open_file

T = TypeVar("T")


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

        Raises `OSError` if it cannot be read, `OtherVersion`, and `ValueError` if it is damaged.
        """
        with open(path) as stream:
            content = stream.read()
        entries = parse_json(content.decode())
        summed, mark, digest = content.rpartition(b',\n "sha256": "')
        if mark and digest != hashlib.sha256(summed + b"\n}").hexdigest().encode() + b'"\n}\n':
            raise ValueError("it was altered: it does not match its own checksum")
        name = str(entries.get("format"))
        if not name.startswith(f"{self.name}-"):
            raise ValueError(f"its format is {name!r}")
        if name != f"{self.name}-{self.version}":
            raise OtherVersion(
                f"{path} is of format {name}, which this version cannot read: {self.remedy}"
            )
        if not mark:
            raise ValueError("its checksum is missing")
        known = [each.name for each in fields(cast(Any, kind)) if each.name in entries]
        try:
            return make(kind, {each: entries[each] for each in known})
        except UserError as error:
            raise ValueError(str(error)) from None
