"""Work that is done where other work takes too long."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


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


def done_in(seconds: float | None, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise what it raises.

    Raises `TimeoutError` where it takes longer than some seconds, unless they are None. Of the time
    for which this process stands still a second counts. The thread of `work` is then left alone,
    and does not keep the process from ending.
    """
    if seconds is None:
        return work()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while seconds > 0 and not wait([result], min(seconds, 1.0)).done:
        seconds -= 1.0
    if not result.done():
        raise TimeoutError
    return result.result()
