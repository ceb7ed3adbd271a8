"""Names of places: of folders and files on this machine's disks, or in an object store."""

import re
from pathlib import Path, PurePath, PurePosixPath

PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*:")  # begins the name of an object
CREDENTIALS = re.compile(r"://[^/]*:[^/]*@")  # USER:PASSWORD@ in such a name


class ObjectPath(PurePosixPath):
    """The name of an object, or of a folder of them: s3://BUCKET/FOLDER/NAME."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def place(name: str | PurePath) -> Path | ObjectPath:
    """Return the path that a name stands for: of an object store, or a local one."""
    path = ObjectPath(name)
    if path.parts and PROTOCOL.fullmatch(path.parts[0]):
        return path if path.parts[0] != "file:" else Path("/", *path.parts[1:])
    return Path(name)
