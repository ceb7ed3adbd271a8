"""Names of places: of folders and files on this machine's disks, or in an object store."""

import re
import unicodedata
from pathlib import Path, PurePath, PurePosixPath

from torchmars.core.errors import UserError

# The protocols of stores, each with the extra of this package that it needs, and that's package.
STORES = {
    "s3": ("s3", "s3fs"),
    "gs": ("gs", "gcsfs"),
    "gcs": ("gs", "gcsfs"),
    "az": ("az", "adlfs"),
    "abfs": ("az", "adlfs"),
}
# The name of an object or a folder of a store. `Path` makes one slash of two.
BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}"
NAME = re.compile(
    rf"(?:(?:{'|'.join(STORES)})://?{BUCKET}|abfs://?{BUCKET}@{BUCKET}\.{BUCKET})(?P<key>/.*)?",
    re.S,
)
FILE = re.compile(r"file:(?://(?:localhost)?)?(/[^/].*)", re.S)  # the name of a local file
# Names that start like the name of a store, well spelled or not.
MEANT = re.compile(
    r".*://|\s*[a-z][a-z0-9+.-]*\s*:[/\\]"
    r"|\s*(?:s3[an]?|gc?s|az|abfss?|https?|file|arn)\s*(?:[:;]|//)",
    re.IGNORECASE | re.DOTALL,
)
# Characters with a special meaning to stores, their clients or URLs.
SPECIAL = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]|::|://|/\.{1,2}(?=/|$)|\s$")
PATTERN = re.compile(r"[*?#\[\]]")
LONGEST = 1024  # bytes of the name of an object, in all of these stores
STORE_NAME = (
    f"s3://BUCKET/FOLDER, or {', '.join(f'{each}://' for each in [*STORES][1:])} instead of s3://, "
    "with letters, digits and . - _ alone in BUCKET, and no credentials: a store's own variables "
    "and files hold these"
)


class ObjectPath(PurePosixPath):
    """The name of an object, or of a folder of them: s3://BUCKET/FOLDER/NAME."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def place_problem(name: str | PurePath, stores: bool = True, pattern: bool = False) -> str:
    """Return why a name can be no path, which `stores` says may be one of a store; "" if it can.

    It may be a `pattern` of many. The text repeats nothing of the name, which may be a secret.
    """
    text = str(name)
    if file := FILE.fullmatch(text):
        return place_problem(file[1], stores, pattern)
    if not MEANT.match(unicodedata.normalize("NFKC", text)):
        return ""
    if not stores:
        return "must be a path of this machine's disks, not the name of a store or an address"
    found = NAME.fullmatch(text)
    if not found:
        return f"must be a path, or the name of a store as {STORE_NAME}"
    key = found["key"] or ""
    if SPECIAL.search(key) or not pattern and PATTERN.search(key):
        return "must name a folder of a store without special characters, as s3://BUCKET/FOLDER"
    if len(key.encode()) > LONGEST:
        return f"must name a folder of a store in at most {LONGEST} bytes"
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
    if file := FILE.fullmatch(text):
        return Path(file[1])
    return ObjectPath(text) if NAME.fullmatch(text) else Path(name)


def local_place(name: str | PurePath, option: str = "a name") -> Path:
    """Return the local path that a name stands for. Raises `UserError` as `place` does."""
    return Path(place(name, option, stores=False))
