"""Who may write in a folder of an object store: the run whose lease lies there.

A store has no locks. So an object beside the checkpoints names the process that has the folder. It
is created only if there is none, and written again every RENEW_SECONDS. A lease unchanged for
LAPSE_SECONDS may be taken. If its former holder wakes up, it sees the new name and publishes
nothing. No clocks are compared.
"""

import contextlib
import json
import os
import secrets
import time
from pathlib import Path, PurePath

from torchmars.cluster import process
from torchmars.core.console import say
from torchmars.core.errors import Unreachable, UserError
from torchmars.core.files import read_text, write_durably
from torchmars.core.locks import shows_life
from torchmars.storage.ownership import LostOwnership, Ownership, in_use
from torchmars.storage.stores import Altered, Store, reading, writing

NAME = "lease.json"
RENEW_SECONDS, LAPSE_SECONDS, SETTLE_SECONDS = 20.0, 60.0, 0.5
LOOK_SECONDS = 30.0  # in which a process that works renews its lease
# Answers to a request to create an object only if there is none: there is one, or it is just
# being made; such a request is not known.
THERE, UNKNOWN = (409, 412), (400, 405, 501)


class StoreOwnership(Ownership):
    """A run's right to publish checkpoints in a folder of an object store."""

    def __init__(self, store: Store, folder: PurePath, run: Path) -> None:
        """Take the lease of `folder` for the run whose own folder is `run`.

        The process of the same run that had it before is over, by the lock of that folder. One of
        another run is waited for. Raises `UserError` if that goes on, and `Unreachable`.
        """
        self.store, self.file = store, folder / NAME
        self.me = {
            "run": run_id(run, make=True),
            "folder": in_store(folder),
            "process": f"process {os.getpid()} on {process.node()}",
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": secrets.token_hex(8),
        }
        self.renewals = 0
        self._take()
        super().__init__(RENEW_SECONDS)

    def check(self) -> None:
        # Another folder's lease takes nothing: somebody has copied that folder over this one.
        found = read_lease(self.store, self.file)
        here = found.get("folder", self.me["folder"]) == self.me["folder"]
        if found.get("token") != self.me["token"] and here:
            if "unknown" in found:  # it may have been spoiled on its way
                raise Unreachable(f"{self.file} cannot be read: it is no lease")
            holder = holder_of(found) if found else "somebody who deleted it"
            raise LostOwnership(
                f"{self.file} was taken by {holder}: this process was silent for too long, and "
                "publishes nothing any more"
            )

    def _give_up(self) -> None:
        with contextlib.suppress(UserError, OSError):
            self.check()
            with writing(self.file):
                self.store.files.rm_file(str(self.file))

    def _take(self) -> None:
        lapsed: dict[str, str] = {}
        while not lapsed:
            if self._create():
                return
            refuse_alive(self.store, self.file, self.me, LAPSE_SECONDS)
            # Or it is this run's. Or it is gone, or just being made: that is seen by another try.
            if not (lapsed := read_lease(self.store, self.file)):
                time.sleep(SETTLE_SECONDS)
        # The former process may have been about to renew it. After that it finds another name.
        while (found := read_lease(self.store, self.file)).get("token") != self.me["token"]:
            if found and found != lapsed and not is_same_run(found, self.me):
                raise in_use(self.file.parent, holder_of(found))
            self._renew()
            time.sleep(SETTLE_SECONDS)

    def _create(self) -> bool:
        """Write the lease if there is none. Return whether it is this process's then."""
        if read_lease(self.store, self.file):
            return False
        created = self._create_only()
        if created and self._create_only() is False:
            return True
        if created is False:
            return False
        self._renew()
        say(
            f"warning: {self.file.parent} is in a store that cannot create an object only where "
            "there is none: nothing keeps a second run from the same folder that starts at the "
            "same moment"
        )
        time.sleep(SETTLE_SECONDS)
        return read_lease(self.store, self.file).get("token") == self.me["token"]

    def _create_only(self) -> bool | None:
        """Ask the store to create the lease. False where there is one, None if it cannot ask."""
        try:
            self.store.files.pipe_file(str(self.file), self._text(), mode="create")
        except FileExistsError:
            return False
        except NotImplementedError:
            return None
        except Exception as error:
            status = status_of(error)
            if status in THERE:
                return False
            if status in UNKNOWN:
                return None
            with reading(self.file):
                raise error
        return True

    def _renew(self) -> None:
        with reading(self.file):
            self.store.files.pipe_file(str(self.file), self._text())

    def _text(self) -> bytes:
        self.renewals += 1
        return json.dumps(self.me | {"renewals": self.renewals}).encode()


def read_lease(store: Store, file: PurePath) -> dict[str, str]:
    """Return the contents of a lease: nothing if there is none, "unknown" if it is damaged.

    A damaged one is waited for as another run's is. Else it would keep all runs off for good.
    """
    content = b""
    try:
        with reading(file):
            content = store.files.cat_file(str(file))
        found = json.loads(content)
    except FileNotFoundError:
        return {}
    except (Altered, ValueError):
        found = None
    unknown = {"process": "an unknown process", "since": "?", "unknown": repr(content)}
    return found if isinstance(found, dict) else unknown


def refuse_another(store: Store, folder: PurePath, run: Path) -> None:
    """Raise `UserError` if a run other than the one in folder `run` renews its lease."""
    me = {"run": run_id(run), "folder": in_store(folder)}
    refuse_alive(store, folder / NAME, me, LOOK_SECONDS)


def refuse_alive(store: Store, file: PurePath, me: dict[str, str], seconds: float) -> None:
    """Wait some seconds for a lease that another run has. Raise `UserError` if it is renewed."""
    found = read_lease(store, file)
    if not found or is_same_run(found, me):
        return
    say(f"waiting to see whether {holder_of(found)} still uses {file.parent}")
    if shows_life(lambda: read_lease(store, file), seconds):
        raise in_use(file.parent, holder_of(found))


def is_same_run(found: dict[str, str], me: dict[str, str]) -> bool:
    """Return whether a lease is one that the run of `me` has taken, and taken here."""
    return found.get("run") == me["run"] and found.get("folder", me["folder"]) == me["folder"]


def status_of(error: BaseException) -> int:
    """Return the status of an answer that an error is about; 0 where it is of no answer."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    found = response.get("ResponseMetadata") if isinstance(response, dict) else None
    return int(found.get("HTTPStatusCode", 0)) if isinstance(found, dict) else 0


def holder_of(found: dict[str, str]) -> str:
    """Return who has a lease, in words."""
    return f"{found.get('process')}, since {found.get('since')}"


def in_store(folder: PurePath) -> str:
    """Return where in its store a folder lies. abfs:// may name the account too."""
    bucket, _, key = str(folder).partition("://")[2].partition("/")
    return f"{bucket.partition('@')[0]}/{key}"


def run_id(run: Path, make: bool = False) -> str:
    """Return the name of a run's folder; one that nobody has where it has none yet.

    It is a random one, of a file that is made with the first lease, and that file's place on its
    disk. So a copy of the folder is another run, and a folder that is moved stays the same.
    """
    file = run / ".lease"
    try:
        if make and not file.exists():
            run.mkdir(parents=True, exist_ok=True)
            write_durably(file, secrets.token_hex(8))
        return f"{read_text(file)} {file.stat().st_ino}"
    except (OSError, UnicodeDecodeError):  # also where the folder cannot be written
        return secrets.token_hex(8)
