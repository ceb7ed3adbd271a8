"""Work that is done where other work takes too long."""

import contextlib
import threading
from collections.abc import Callable, Iterator


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
