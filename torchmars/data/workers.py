"""Processes that tokenise.

Each reads blocks from its stdin and writes the results to its stdout, so it ends when the process
that started it ends, however that comes. `multiprocessing` would import that one's main module
again, and torch with it, and would leave its processes behind where that one is killed.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

from torchmars.cluster.callers import found_as_here
from torchmars.core.errors import UserError
from torchmars.data.documents import Encoded, Encoder, TextBlock

Submit = Callable[[TextBlock], "Future[Encoded]"]
"""Takes a block, and gives the result later."""


@contextlib.contextmanager
def start_workers(encoder: Encoder, count: int) -> Iterator[Submit]:
    """Start `count` processes, which end with the context. One is this process itself.

    Blocks that were submitted but not started by then are dropped.
    """
    if count == 1:
        yield lambda block: finished(encoder, block)
        return
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()
    processes = [start_worker(encoder) for _ in range(count)]
    for process in processes:
        idle.put(process)

    def encode(block: TextBlock) -> Encoded:
        process = idle.get()
        try:
            return exchange(process, block)
        finally:
            idle.put(process)

    with ThreadPoolExecutor(count) as threads:  # one for each process waits for it
        try:
            yield lambda block: threads.submit(encode, block)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
    for process in processes:
        with contextlib.suppress(OSError):  # what could not be sent any more
            process.__exit__(None, None, None)


def finished(encoder: Encoder, block: TextBlock) -> "Future[Encoded]":
    """Return the result of a block, tokenised in this process."""
    future: Future[Encoded] = Future()
    future.set_result(encoder.encode(block))
    return future


def start_worker(encoder: Encoder) -> subprocess.Popen:
    """Start a process and give it its settings."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchmars.data.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | found_as_here(os.environ),
        process_group=0,  # Ctrl-C is for the process that starts it
    )
    with contextlib.suppress(OSError):  # `exchange` says that it is gone
        send(encoder, process.stdin)
    return process


def exchange(process: subprocess.Popen, block: TextBlock) -> Encoded:
    """Return a process's result of a block. Raises `UserError` if it fails, or is gone."""
    try:
        send(block, process.stdin)
        result: Encoded | UserError = pickle.load(cast(BinaryIO, process.stdout))
    except (EOFError, OSError, pickle.UnpicklingError):
        code = process.wait()
        raise UserError(
            f"a process that tokenises has died (exit code {code}): start again to continue; with "
            "less memory, set data.processes lower"
        ) from None
    if isinstance(result, UserError):
        raise result
    return result


def send(thing: Encoder | TextBlock | Encoded | UserError, stream: Any) -> None:
    """Write a thing for the process at the other end."""
    pickle.dump(thing, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def main() -> None:
    """Tokenise the blocks on stdin until there are no more."""
    # Whatever prints must not print between the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    blocks = sys.stdin.buffer
    # The process that started this one may die at any time, in the middle of a block too.
    with contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
        encoder: Encoder = pickle.load(blocks)
        while True:
            block = pickle.load(blocks)
            try:
                result: Encoded | UserError = encoder.encode(block)
            except UserError as error:
                result = error
            send(result, results)
    os._exit(0)  # it would write what `results` still holds, and say that it cannot


if __name__ == "__main__":
    main()
