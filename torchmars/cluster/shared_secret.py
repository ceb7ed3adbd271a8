"""The secret of the jobs of an array, which have no script in common that could make one."""

import os
import secrets
from pathlib import Path

from torchmars.core.errors import UserError, file_errors


def shared_secret(folder: Path, array: str) -> str:
    """Return the secret of the jobs of `array`, in a file of the run's `folder`.

    The first of them makes it, for its user alone. Raises `UserError` where others could have read
    or written it.
    """
    file = folder / f"token-{array}"
    with file_errors(f"{file}, the secret of the array's jobs", "set RDZV_TOKEN to one of yours"):
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"token-{array}-{secrets.token_hex(8)}"
        try:
            with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(secrets.token_hex(32))
                stream.flush()
                os.fsync(stream.fileno())
            os.link(own, file)  # whole, or not at all
        except FileExistsError:
            pass
        finally:
            own.unlink(missing_ok=True)
        found = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        with open(found) as stream:
            about = os.fstat(found)
            if about.st_uid != os.getuid() or about.st_mode & 0o077:
                raise UserError(
                    f"others can read or write {file}, the secret of the array's jobs: delete it, "
                    "or set RDZV_TOKEN"
                )
            return stream.read()
