"""Errors that are not mistakes of the code, how a command reports them, and exit codes."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from torchmars.begin import install_command
from torchmars.core.console import say

EXIT_MISTAKE = 2
EXIT_UNCONNECTED = 69  # EX_UNAVAILABLE of sysexits.h: not connected in time; start it again
EXIT_HUNG = 70  # EX_SOFTWARE
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped from outside and saved; start it again to resume
EXIT_REGROUP = 76  # of ranks that end to start again with other machines: only launchers see it
EXIT_INTERRUPTED = 128 + signal.SIGINT

# USER:PASSWORD@ of an address; the number of a port is no password.
PASSWORD = re.compile(r"(?:(?<=//)|(?<=s3:)|(?<=gs:)|(?<=az:))[^\s/@:]*:(?!\d{1,5}/)[^\s@]*@")
# The environment variable with the file in which a rank leaves its exit code for its launcher.
EXIT_CODE_FILE = "TORCHMARS_EXIT_CODE_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # that in which torchrun expects a rank's error


class UserError(Exception):
    """A mistake in a config, a file or a command line.

    The message is one line that names the option, file or shard and the remedy.
    """

    def __str__(self) -> str:
        """Return the message in one line, even if it quotes others in several."""
        return " ".join(super().__str__().split())


class Unreachable(UserError):
    """A store or another machine does not answer. It may do so later, and the command be right."""


def missing_package(package: str, purpose: str, extra: str = "data") -> UserError:
    """Return the error of a package, of an extra or of none (""), that is not installed."""
    return UserError(f"{purpose} needs the package {package}: {install_command(extra, package)}")


@contextlib.contextmanager
def needs_package(package: str, purpose: str, extra: str = "data") -> Iterator[None]:
    """Raise a `UserError` where the package that the body imports is not installed."""
    try:
        yield
    except ImportError:
        raise missing_package(package, purpose, extra) from None


@contextlib.contextmanager
def file_errors(problem: str, remedy: str = "") -> Iterator[None]:
    """Raise a `UserError` of a problem with files, for an `OSError` of the body."""
    try:
        yield
    except OSError as error:
        more = f": {remedy}" if remedy else ""
        raise UserError(f"{problem}: {error.strerror or error}{more}") from None


class LostRank(Exception):
    """Another rank is gone, or never came: its own error matters, and this says where to look."""


class LoneMistake(Exception):
    """What this rank alone has found, while the others wait for it. One line with the remedy."""


class Ended(SystemExit):
    """The end of this process, asked for by this package; any other is of code of the user's."""


@contextlib.contextmanager
def exit_on_user_error(quiet: bool = False) -> Iterator[None]:
    """End the process with code 2 and one line on stderr when the body raises `UserError`.

    `quiet` ends it without the line: for every rank but the first, which prints it for all. Ctrl-C
    ends it with 130.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as torchmars/begin.py has made it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        if not quiet:
            say_error(error)
        code = EXIT_UNCONNECTED if isinstance(error, Unreachable) else EXIT_MISTAKE
        raise Ended(code) from None
    except KeyboardInterrupt:
        raise Ended(EXIT_INTERRUPTED) from None


def in_a_line(error: object) -> str:
    """Return an error in one line, whose addresses have no USER:PASSWORD@ and no query."""
    text = re.sub(r"(://[^\s?]*\?)[^\s'\")]+", r"\1...", " ".join(str(error).split()))
    return PASSWORD.sub("...@", text)


def say_error(error: object) -> None:
    """Print an error on stderr, `in_a_line`."""
    say(f"error: {in_a_line(error)}", error=True)


def report_failure(error: BaseException, crash: bool = False) -> None:
    """Print an error of this rank on stderr, in one line or, of a `crash`, with its traceback.

    Leave it in the file that torchrun has named, if there is one, whole or not at all: a launcher
    that has seen another rank die ends this one at any moment, and torchrun fails on the half of a
    file. The launcher prints the first failure last.
    """
    if file := os.environ.get(ERROR_FILE):
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        os.environ[ERROR_FILE] = partial = f"{file}.partial"
        ErrorHandler().record_exception(error)
        os.replace(partial, file)
    if crash:
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        say_error(error)


def end_at_once(code: int) -> NoReturn:
    """End the process without the clean-up of Python and torch, which may wait for others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_exit_code(code: int) -> int:
    """Leave this rank's exit code for its launcher, if there is one.

    Returns the code with which the process must then end.
    """
    if file := os.environ.get(EXIT_CODE_FILE):
        with contextlib.suppress(OSError):  # a launcher that is gone may have taken the folder
            Path(file).write_text(str(code))
            return 0
    return code
