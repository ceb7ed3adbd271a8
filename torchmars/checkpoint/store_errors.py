"""What an object store raises, in the words of this package."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import PurePath

from torchmars.core.errors import Unreachable, UserError

# How the names end of variables that hold what nobody may read.
SECRETS = ("KEY", "KEY_ID", "TOKEN", "SECRET", "PASSWORD")


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Raise `Unreachable` for whatever a store raises but for an object that is missing."""
    try:
        yield
    except (UserError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        if "bucket" in str(error):
            raise Unreachable(f"{path}: {reason(error)}: make it, or name another one") from None
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
    except Exception as error:
        raise Unreachable(
            f"{path} cannot be read ({reason(error)}): see that the store answers and lets you "
            "read there, and start it again"
        ) from None


@contextlib.contextmanager
def writing(path: PurePath) -> Iterator[None]:
    """Raise an `OSError` with its reason for whatever a store raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, reason(error), str(path)) from None


def reason(error: Exception) -> str:
    """Return in one line what a store says is wrong. It never holds credentials."""
    text = " ".join(str(error).split()) or type(error).__name__
    for name, value in os.environ.items():
        if value and name.endswith(SECRETS):
            text = text.replace(value, "...")
    return text
