"""Real gloo processes for tests: `run_ranks(function, 4, ...)` calls `function` on four ranks."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The server imports torch once and forks a fresh process for every rank, before any thread of torch's has started.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
                                 "torchmars.trainer", "tests.ranks"])


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on `size` ranks with a gloo process group; the results in rank order.

    `function` must be importable and its results picklable. The first failing rank's traceback becomes an AssertionError.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        ranks = [_context.Process(target=_rank, args=(function, rank, size, f"{folder}/store", results, args), daemon=False)
                 for rank in range(size)]
        for process in ranks:
            process.start()
        try:
            outcomes = [results.get(timeout=timeout) for _ in ranks]
        finally:
            for process in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
        failed = [error for _, _, error in outcomes if error]
        assert not failed, "\n".join(failed)
        return [pickle.loads(result) for _, result, _ in sorted(outcomes)]


def _rank(function: Callable[..., Any], rank: int, size: int, store: str, results: Any, args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        # Bytes, since a tensor in a queue dies with the process that shares its memory.
        results.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
