"""The lease of a run's folder in an object store: it keeps other runs off, and those that are over.

A store has no locks. So an object beside the checkpoints names the process that has the folder. It
is created only where there is none, and written again every RENEW_SECONDS. Whoever finds one that
stays as it is for LAPSE_SECONDS takes the folder, and the former process, should it wake up, finds
another name there before it publishes a checkpoint. No clocks are compared.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path, PurePath

from torchmars.cluster import process
from torchmars.core.console import say
from torchmars.core.errors import Unreachable, UserError
from torchmars.core.stores import Altered, Store, reading, writing

NAME = "lease.json"
RENEW_SECONDS, LAPSE_SECONDS, SETTLE_SECONDS = 20.0, 60.0, 0.5


class LostLease(UserError):
    """Another process has taken the lease of this one."""


class Lease:
    """A run's right to publish checkpoints in a folder of an object store."""

    def __init__(self, store: Store, folder: PurePath, run: Path) -> None:
        """Take the lease of `folder` for the run whose own folder is `run`.

        The process of the same run that had it before is over, by the lock of that folder. One of
        another run is waited for. Raises `UserError` where that goes on, and `Unreachable`.
        """
        self.store, self.file = store, folder / NAME
        self.me = {
            "run": run_id(run),
            "process": f"process {os.getpid()} on {process.node()}",
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": secrets.token_hex(8),
        }
        self.renewals = 0
        self._take()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise `LostLease` if another process has taken the lease, and `Unreachable`."""
        found = self._read()
        if found.get("token") != self.me["token"]:
            if "unknown" in found:  # it may have been spoiled on its way
                raise Unreachable(f"{self.file} cannot be read: it is no lease")
            holder = named(found) if found else "somebody who deleted it"
            raise LostLease(
                f"{self.file} was taken by {holder}: this process was silent for too long, and "
                "publishes nothing any more"
            )

    def release(self) -> None:
        """Give the folder free, if it is still this process's."""
        self.ended.set()
        self.thread.join()
        with contextlib.suppress(UserError, OSError):
            self.check()
            with writing(self.file):
                self.store.files.rm_file(str(self.file))

    def _take(self) -> None:
        if self._create():
            if self._create():
                say(
                    f"warning: {self.file.parent} is in a store that cannot create an object only "
                    "where there is none: nothing keeps a second run from the same folder"
                )
            return
        found, since, told = self._read(), time.monotonic(), False
        while found and found.get("run") != self.me["run"]:
            if time.monotonic() - since > LAPSE_SECONDS:
                break
            if not told:
                say(f"waiting to see whether {named(found)} still uses {self.file.parent}")
            told = True
            time.sleep(1.0)
            if (now := self._read()) and now != found:
                raise UserError(
                    f"another run uses {self.file.parent} ({named(now)}): stop it first, or set "
                    "checkpoint.folder to another folder"
                )
        # The former process may have been about to renew it. After that it finds another name.
        while self._read().get("token") != self.me["token"]:
            self._write()
            time.sleep(SETTLE_SECONDS)

    def _create(self) -> bool:
        """Write the lease where there is none. Return whether there was none."""
        try:
            self.store.files.pipe_file(str(self.file), self._text(), mode="create")
        except FileExistsError:
            return False
        except NotImplementedError:
            self._write()
        except Exception as error:
            with reading(self.file):
                raise error
        return True

    def _renew(self) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            with contextlib.suppress(UserError, OSError):  # told where something is published
                self.check()
                self._write()

    def _read(self) -> dict[str, str]:
        """Return what the lease says: nothing where there is none, "unknown" where it is damaged.

        A damaged one is waited for as another run's is. Else it would keep all runs off for good.
        """
        content = b""
        try:
            with reading(self.file):
                content = self.store.files.cat_file(str(self.file))
            found = json.loads(content)
        except FileNotFoundError:
            return {}
        except (Altered, ValueError):
            found = None
        unknown = {"process": "an unknown process", "since": "?", "unknown": repr(content)}
        return found if isinstance(found, dict) else unknown

    def _write(self) -> None:
        with reading(self.file):
            self.store.files.pipe_file(str(self.file), self._text())

    def _text(self) -> bytes:
        self.renewals += 1
        return json.dumps(self.me | {"renewals": self.renewals}).encode()


def named(found: dict[str, str]) -> str:
    """Return who has a lease, in words."""
    return f"{found.get('process')}, since {found.get('since')}"


def run_id(run: Path) -> str:
    """Return the random name of a run's folder, which is made with the first lease."""
    file = run / ".lease"
    try:
        return file.read_text()
    except OSError:
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(8))
        return file.read_text()
