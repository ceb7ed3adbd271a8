"""What is said on the console. A terminal that is gone or a log on a full disk must not end a run."""

import os
import sys


def say(text: str, error: bool = False) -> None:
    """Print a line on stdout, or on stderr for an `error`, at once. What cannot be written is dropped."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _discard(stream.fileno(), stream)


def _discard(descriptor: int, stream) -> None:
    # The stream keeps what it could not write and would fail with it for ever: let it write that to nowhere.
    kept, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    stream.flush()
    os.dup2(kept, descriptor)
    os.close(kept), os.close(nowhere)
