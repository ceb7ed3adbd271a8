"""Versions and checksums of the JSON files that describe a checkpoint or a folder of data.

Such a file names its format, `torchmars-NAME-VERSION`. Its last entry is a checksum: the SHA-256
of the bytes of the same file without that entry. Whoever checks it need not know the other
entries. Every version to come keeps both, so that this one can tell another version's file from a
damaged one.

A version may add entries, and readers of the same version ignore those they do not know. Any
other change makes a new version. What it renames is a line in `Format.renamed`, what it adds and
older files lack is one in `Format.added`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchmars.core.errors import UserError
from torchmars.core.files import read_bytes
from torchmars.core.typed import make, parse_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

CHECKSUM = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
CHECKSUM_SIZE = len(b',\n "sha256": ""\n}\n') + 64


class OtherVersion(UserError):
    """A file of a format that this version cannot read. It is not damaged."""


@dataclass(frozen=True)
class Format:
    """A kind of file: how it is written today, and which of its versions are read."""

    name: str
    written: int
    """The version that new files have."""
    oldest: int
    """The oldest version that is read."""
    checksum_since: int
    """The first version with a checksum."""
    remedy: str
    """What to do with a file of a version that is not read."""
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """New names of entries by old ones, by the last version with the old. Dots lead into tables."""
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The value in older files of an entry that is new, by the last version without it."""

    def text(self, entries: dict[str, Any]) -> str:
        """Return the text of a file with these entries, its format and its checksum."""
        entries = {"format": f"{self.name}-{self.written}"} | entries
        digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
        return json.dumps(entries | {"sha256": digest}, indent=1) + "\n"

    def read(self, path: Path, kind: type[T]) -> T:
        """Return what a file holds as a `kind`, a dataclass, under the names of today.

        Raises `OSError` if it cannot be read, `OtherVersion`, and `ValueError` where it is
        damaged.
        """
        content = read_bytes(path)
        entries = parse_json(content.decode())
        matches = checksum_matches(content)
        if matches is False:
            raise ValueError("it was altered: it does not match its own checksum")
        name = entries.pop("format", None)
        version = self.version(name)
        if version is None:
            raise ValueError(f"its format is {name!r}")
        if not self.oldest <= version <= self.written:
            raise OtherVersion(
                f"{path} is of format {name}, which this version cannot read: {self.remedy}"
            )
        if matches is None and version >= self.checksum_since:
            raise ValueError("its checksum is missing")
        entries.pop("sha256", None)
        if version == self.written:
            known = {each.name for each in fields(kind)}
            entries = {key: value for key, value in entries.items() if key in known}
        self.bring_up_to_date(version, entries)
        try:
            return make(kind, entries)
        except UserError as error:
            raise ValueError(str(error)) from None

    def bring_up_to_date(self, version: int, entries: dict[str, Any]) -> None:
        """Give the entries of a file of an older version their names of today."""
        for older in range(version, self.written):
            entries |= self.added.get(older, {})
            for old, new in self.renamed.get(older, {}).items():
                rename(entries, old, new)

    def version(self, name: Any) -> int | None:
        """Return the version in `name`, the format of a file; None for another kind of file."""
        found = re.fullmatch(rf"{self.name}-([1-9][0-9]{{0,8}})", str(name))
        return int(found[1]) if found else None


def checksum_matches(content: bytes) -> bool | None:
    """Return whether a file matches the checksum at its end; None if it has none."""
    last = CHECKSUM.fullmatch(content[-CHECKSUM_SIZE:])
    if last is None:
        return None
    without = content[:-CHECKSUM_SIZE] + b"\n}"
    return hashlib.sha256(without).hexdigest() == last[1].decode()


def rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Rename an entry, if it is there. Dots in the names lead into tables."""
    *tables, old_key = old.split(".")
    source: Any = entries
    for table in tables:
        source = source.get(table) if isinstance(source, dict) else None
    if not isinstance(source, dict) or old_key not in source:
        return
    *tables, new_key = new.split(".")
    target: Any = entries
    for table in tables:
        target = target.setdefault(table, {}) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target[new_key] = source.pop(old_key)
