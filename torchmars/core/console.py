"""The console. A terminal that is gone or a log on a full disk must not end a run."""

import contextlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

# Characters that steer a terminal instead of being shown, such as those of a model that has not
# learnt much, and halves of pairs of UTF-16, which stand for bytes of names that are no UTF-8.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
quiet = False  # whether warnings and errors alone are shown


def is_shown(text: str = "") -> bool:
    """Return whether the console shows a line."""
    return not quiet or bool(re.match("(warning|error)[: ]", text))


def harmless(text: str) -> str:
    """Return a text whose characters that steer a terminal are written as Python writes them."""
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def say(*lines: str, error: bool = False) -> None:
    """Print lines at once if the first is shown, `harmless`, on stdout or, for an `error`, stderr.

    What cannot be written is dropped.
    """
    text = "\n".join(lines)
    if is_shown(text):
        write(harmless(text) + "\n", sys.stderr if error else sys.stdout)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print a text at once, on stdout or another stream. Drop it if that fails.

    A terminal gets it `harmless`; a file, and a program at the other end of a pipe, as it is.
    """
    stream = stream or sys.stdout
    if stream is not None and stream.isatty():
        text = harmless(text)
    try:
        print(text, end="", file=stream, flush=True)
    except UnicodeEncodeError:  # the terminal knows fewer characters
        write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding), stream)
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Drop the text that a stream could not write. It would otherwise fail with it for ever."""
    descriptor = stream.fileno()
    kept, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    stream.flush()
    os.dup2(kept, descriptor)
    os.close(kept)
    os.close(nowhere)


def next_commands(*commands: Sequence[str]) -> list[str]:
    """Return a line for each command that may come next, to be pasted into a shell."""
    return labelled("next", *map(shlex.join, commands))


def labelled(label: str, *lines: str) -> list[str]:
    """Return lines that stand beside each other under a label, which the first one bears."""
    return [f"{'' if number else label:<9} {line}" for number, line in enumerate(lines)]


@contextlib.contextmanager
def unless_done_in(seconds: float, work: Callable[[], object]) -> Iterator[None]:
    """Do `work` on a thread while the body still runs after some seconds."""
    late = threading.Timer(seconds, work)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
