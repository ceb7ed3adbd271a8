"""Where a run's files lie: on this machine's disks, or in an object store.

`storage_of` tells which of the two a path means. Whoever writes there has an `Owner`.
"""

from pathlib import Path, PurePath

from torchmars.storage.local import LOCAL, FileOwner, LocalStorage
from torchmars.storage.objects import OBJECTS, ObjectStorage, StoreOwner

Storage = LocalStorage | ObjectStorage
Owner = FileOwner | StoreOwner


def storage_of(path: PurePath) -> Storage:
    """Return where a path, which `place` gave, lies."""
    return LOCAL if isinstance(path, Path) else OBJECTS
