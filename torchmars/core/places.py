"""Names of places: of folders and files on this machine's disks, or in an object store."""

import re
from pathlib import Path, PurePath, PurePosixPath

from torchmars.core.errors import UserError

# The protocols of stores, which are also this package's extras, each with what the extra installs.
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
PROTOCOLS = "|".join(STORES)
# What is no path, though one could be called so: else a folder `S3:` would be made on a disk.
ADDRESS = re.compile(rf".*://|[a-z][\w+.-]*:/|({PROTOCOLS}|file):", re.I | re.S)
# The name of an object, or of a folder of them. `Path` makes one slash of two.
NAME = re.compile(rf"({PROTOCOLS})://?[A-Za-z0-9][A-Za-z0-9._-]*(/.*)?", re.S)
WILD = re.compile(r"[*?#\[\]]")


class ObjectPath(PurePosixPath):
    """The name of an object, or of a folder of them: s3://BUCKET/FOLDER/NAME."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def place_problem(name: str | PurePath, stores: bool = True, pattern: bool = False) -> str:
    """Return why a name can be no path, which `stores` says may be one of a store; "" if it can.

    It may be a `pattern` of many.
    """
    text = str(name)
    if not ADDRESS.match(text):
        return ""
    if not stores:
        return "must be a path of this machine's disks, not the name of a store or an address"
    if not NAME.fullmatch(text) or WILD.search(text) and not pattern:
        return (
            "must be a path, or the name of a store as s3://BUCKET/FOLDER, or gs:// or az:// "
            "instead of s3://, without special characters and credentials"
        )
    return ""


def place(
    name: str | PurePath, option: str = "a name", stores: bool = True, pattern: bool = False
) -> Path | ObjectPath:
    """Return the path that a name stands for: of an object store, or a local one.

    Raises `UserError`, which calls it `option`, if `place_problem` finds a fault.
    """
    if wrong := place_problem(name, stores, pattern):
        raise UserError(f"{option} {wrong}")
    text = str(name)
    return ObjectPath(text) if NAME.fullmatch(text) else Path(name)


def local_place(name: str | PurePath, option: str = "a name") -> Path:
    """Return the local path that a name stands for. Raises `UserError` as `place` does."""
    return Path(place(name, option, stores=False))
