"""A folder in shared memory that belongs to a launcher, so that it outlives its ranks."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchmars.core.files import is_locked, locked

PLACE = Path("/dev/shm")
PREFIX = f"torchmars-{os.getuid()}-"
# The environment variable with the folder, for the ranks.
MEMORY = "TORCHMARS_MEMORY"
LOCK = "lock"  # begins the names of the locks of a launcher and its ranks


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    """Have a folder in shared memory in the body, which ranks that are started there find.

    Leftovers of crashed launchers are deleted first. Without shared memory there is no folder.
    """
    os.environ.pop(MEMORY, None)
    try:
        clean()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    except OSError:
        yield
        return
    os.environ[MEMORY] = str(folder)
    try:
        with locked(folder / "starting", "using it"):
            with contextlib.suppress(OSError):  # where there are no locks
                # Others look for LOCK: it must be locked as soon as they can see it.
                (folder / "starting").rename(folder / LOCK)
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean() -> None:
    """Delete the folders of launchers that are gone, and whose ranks are.

    Of one that just begins there is no lock. What others have made under such a name stays.
    """
    for folder in PLACE.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            held = [is_locked(file, local=True) for file in folder.glob(f"{LOCK}*")]
            if held and not any(each is not False for each in held):
                shutil.rmtree(folder)


def memory_of_launcher() -> Path | None:
    """Return the folder of this rank's launcher; None if it has none."""
    folder = os.environ.get(MEMORY)
    return None if folder is None else Path(folder)
