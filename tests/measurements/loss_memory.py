"""Measure memory and time of the loss and its gradients, with whole logits and in chunks.

    python -m tests.measurements.loss_memory [--tokens 8192] [--rows 128256] [--width 1024]

It prints a table: the peak of the process above what lies before, with the gradients in it, and the
median, smallest and largest seconds. "whole" is the head's product and torch's cross_entropy on
logits in float32. "chunks of N" is ours, with "*" where the rule has chosen N. The kinds take
turns; the compiled ones are compiled before. On a GPU it runs there, and memory is the GPU's.
"""

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmars.core.words import table
from torchmars.parallel.cuts import chunk_tokens
from torchmars.parallel.loss import mean_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none").mean()


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def measure(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[int, float]:
    """The peak of a forward and backward pass above the memory before it, and its seconds."""
    for each in inputs:
        each.grad = None
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # look for the peak anew from here
    began = time.perf_counter()
    loss(*inputs).backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, time.perf_counter() - began
    seconds = time.perf_counter() - began
    return resident("VmHWM") - before, seconds


def contenders(rows: int, chunks: list[int], whole: bool) -> dict[str, Callable[..., Tensor]]:
    by_rule = chunk_tokens(DEVICE.type, rows)
    kinds: dict[str, Callable[..., Tensor]] = {"whole": whole_loss} if whole else {}
    for chunk in sorted({*chunks, by_rule}):
        name = f"chunks of {chunk:,}{' *' if chunk == by_rule else ''}"
        kinds[name] = partial(mean_loss, chunk=chunk)
        kinds[f"{name}, compiled"] = partial(mean_loss, chunk=chunk, compile=True)
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=128256)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="also of so many tokens")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-whole", action="store_true", help="leave whole logits out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lines = [("dtype", "loss", "peak, MiB", "seconds", "from", "to")]
    for name in options.dtypes:
        dtype = getattr(torch, name)
        hidden = torch.randn(options.tokens, options.width, dtype=dtype, device=DEVICE)
        weight = torch.randn(options.rows, options.width, dtype=dtype, device=DEVICE) / 32
        targets = torch.randint(options.rows, (options.tokens,), device=DEVICE)
        inputs = hidden.requires_grad_(), weight.requires_grad_(), targets
        kinds = contenders(options.rows, options.chunks, not options.no_whole)
        found = {kind: [] for kind in kinds}
        for kind, loss in kinds.items():
            if "compiled" in kind:
                measure(loss, inputs)
        for _ in range(options.turns):
            for kind, loss in kinds.items():
                found[kind].append(measure(loss, inputs))
        for kind, measured in found.items():
            times = [seconds for _, seconds in measured]
            figures = [statistics.median(times), min(times), max(times)]
            peak = max(size for size, _ in measured) / 2**20
            lines.append((name, kind, f"{peak:,.0f}", *(f"{each:.3f}" for each in figures)))
    print("\n".join(table(lines, right=(2, 3, 4, 5))))


if __name__ == "__main__":
    main()
