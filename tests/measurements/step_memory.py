"""Measure the memory that a step takes on top of weights: accumulation, activation checkpointing.

python -m tests.measurements.step_memory [--compile]

A GPT-2 of 44 million parameters on 2 CPU ranks (FSDP), 4 microbatches of 2 x 512 tokens in float32.
Of each kind it prints the peak of rank 0's resident memory above that before the step, in MiB, and
the seconds of the step. --compile adds compiled blocks, which take a minute.
"""

import argparse
import ctypes
import time
from pathlib import Path

import torch

from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.config.gpt2 import GPT2Args
from torchmars.models.gpt2 import GPT2
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

ARGS = GPT2Args(n_layer=12, n_head=8, n_embd=512, vocab_size=12288, seq_len=512)
MICROBATCHES, SIZE = 4, 2
KINDS = [
    ("accumulate sharded", {}, {}, False),
    ("accumulate reduced", {"accumulate": "reduced"}, {}, False),
    ("accumulate whole", {"accumulate": "whole"}, {}, False),
    ("checkpointing full", {}, {"mode": "full"}, False),
    ("checkpointing full, every 2nd", {}, {"mode": "full", "every": 2}, False),
    ("checkpointing selective", {}, {"mode": "selective"}, False),
]
COMPILED_KINDS = [
    ("compiled", {}, {}, True),
    ("compiled, full", {}, {"mode": "full"}, True),
    ("compiled, selective", {}, {"mode": "selective"}, True),
]


def resident(name):
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def measure(parallelism, activations, compile):
    """The peak of a step above the memory before it, in bytes, and its seconds."""
    # M_MMAP_THRESHOLD: freed memory goes back to the system at once, so that it can be measured.
    ctypes.CDLL(None).mallopt(-3, 65536)
    layout = Layout.create(torch.device("cpu"), parallelism.degrees(2))
    with torch.device("meta"):
        whole = GPT2(ARGS)
    training = TrainingConfig(dtype="float32", seq_len=ARGS.seq_len, compile=compile)
    model = ParallelModel(whole, parallelism, training, activations, layout, layout.device)
    model.init_weights(seed=0)
    batch = torch.randint(ARGS.vocab_size, (MICROBATCHES * SIZE, ARGS.seq_len + 1)).split(SIZE)
    for _ in range(2):  # the first one compiles
        for weight in model.weights.values():
            weight.grad = None
        before, began = resident("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # look for the peak anew from here
        model.backward(batch)
        result = resident("VmHWM") - before, time.perf_counter() - began
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true")
    kinds = KINDS + (COMPILED_KINDS if parser.parse_args().compile else [])
    for name, parallelism, activations, compile in kinds:
        peak, seconds = run_ranks(
            measure,
            2,
            ParallelismConfig(**parallelism),
            ActivationCheckpointConfig(**activations),
            compile,
        )[0]
        print(f"{name:32} {peak / 2**20:8.1f} MiB {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
