"""Where a run's files lie: on this machine's disks, or in an object store.

`storage_of` tells which of the two a path means. Both are a `Storage`, and whoever writes there has
an `Owner`.
"""

from pathlib import Path, PurePath

from torchmars.storage.local import LOCAL
from torchmars.storage.objects import OBJECTS
from torchmars.storage.storage import Storage


def storage_of(path: PurePath) -> Storage:
    """Return where a path, which `place` gave, lies."""
    return LOCAL if isinstance(path, Path) else OBJECTS
