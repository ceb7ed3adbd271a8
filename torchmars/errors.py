"""The one exception for what a user can get wrong, and how a command reports it."""

import contextlib
from collections.abc import Iterator

from torchmars.console import say


EXIT_MISTAKE = 2
EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped from outside and saved; start it again to go on


class UserError(Exception):
    """A mistake in a config, a file or a command line.

    The message is one line that names the option, file or shard and says what to do.
    """


@contextlib.contextmanager
def reported(quiet: bool = False) -> Iterator[None]:
    """End the process with code 2 and one line on stderr when the body raises `UserError`.

    `quiet` ends it without the line: for every rank but the first, which says it for all. Ctrl-C ends with 130.
    """
    try:
        yield
    except UserError as error:
        if not quiet:
            say(f"error: {' '.join(str(error).split())}", error=True)
        raise SystemExit(EXIT_MISTAKE) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
