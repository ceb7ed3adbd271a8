"""Real gloo processes for tests: `run_ranks(function, 4, ...)` calls `function` on four ranks.

A server process starts once for a whole pytest worker. It imports all that a run needs, and every
rank is a fork of it. A fork costs 0.05 s of CPU time, a process that imports torch itself 4 s. So
no rank inherits what another test has changed: patches, environment variables, caches, locks.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 900  # seconds until silent ranks are taken to hang: more than any busy machine needs
SHOW_STACK = signal.SIGRTMIN  # asks a rank where it stands

# The server forks before any thread of torch's has started.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # the first step of an optimizer imports it: 0.7 s in each rank
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.utils.serialization.config",
        "torchmars.train",
        "torchmars.commands.launch",
        "torchmars.commands.train",
        "torchmars.commands.prepare",
        "torchmars.commands.evaluate",
        "torchmars.commands.export",
        "tests.support.commands",
        "tests.support.tiny",
        "tests.support.warm",
    ]
)


def run_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on `size` ranks of a gloo process group; return results by rank.

    `function` must be importable and its results picklable. Raises `AssertionError` with the
    tracebacks of the ranks that failed, or the stacks of all ranks where one has died by a signal.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(
                target=_rank,
                args=(function, rank, size, Path(folder), results, args),
                daemon=False,
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            outcomes = _collect(results, ranks, time.monotonic() + PATIENCE, Path(folder))
        except BaseException:
            for process in ranks:
                process.kill()
            raise
        finally:
            for process in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                    process.join()
        failed = [error for _, _, error in outcomes if error]
        assert not failed, "\n".join(failed)
        return [pickle.loads(result) for _, result, _ in sorted(outcomes)]


def _collect(
    results: Any, ranks: list[Any], deadline: float, folder: Path
) -> list[tuple[int, bytes | None, str | None]]:
    """Wait for the outcome of every rank: its number, its pickled result, its traceback."""
    outcomes: list[tuple[int, bytes | None, str | None]] = []
    while len(outcomes) < len(ranks):
        with contextlib.suppress(queue.Empty):
            outcomes.append(results.get(timeout=0.1))
            continue
        heard = {rank for rank, _, _ in outcomes}
        for rank, process in enumerate(ranks):
            assert process.exitcode in (None, 0) or rank in heard, (
                f"rank {rank} died: exit code {process.exitcode}\n{_stacks(ranks, folder)}"
            )
        assert time.monotonic() < deadline, (
            f"no result from ranks {sorted(set(range(len(ranks))) - heard)} in time"
        )
    return outcomes


def _stacks(ranks: list[Any], folder: Path) -> str:
    """Where each rank stands, or stood when a signal ended it."""
    alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in alive:
        with contextlib.suppress(OSError):
            os.kill(ranks[rank].pid, SHOW_STACK)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(
        ranks[rank].is_alive() and not _stack_of(folder, rank) for rank in alive
    ):
        time.sleep(0.1)
    texts = [_stack_of(folder, rank) for rank in range(len(ranks))]
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))


def _stack_of(folder: Path, rank: int) -> str:
    file = _stack_file(folder, rank)
    return file.read_text(errors="replace") if file.exists() else ""


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _rank(
    function: Callable[..., Any], rank: int, size: int, folder: Path, results: Any, args: tuple
) -> None:
    """Be one rank."""
    stack = _stack_file(folder, rank).open("w")
    faulthandler.enable(stack)
    faulthandler.register(SHOW_STACK, stack)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
        # Bytes, since a tensor in a queue dies with the process that shares its memory.
        results.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
