"""Measure on one GPU all that the pages say of GPUs, in less than ten minutes.

    python -m tests.gpu.measure [FILE.json] [--only optimizers gpt2 llama] [--smoke]

Tokens per second and MFU of GPT-2 small and of Llama 1B, in bfloat16, eager and compiled: a step of
torchmars with mars-adamw, and the plainest loop around the same model with `clip_grad_norm_` and
torch's fused AdamW. Then the optimizers' steps alone, and what share of the copy bandwidth
mars-adamw reaches. It prints Markdown tables, and writes FILE.json. `--smoke` runs the same code on
tiny sizes, also on a CPU, where its numbers mean nothing.
"""

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.device import DEVICE
from tests.measurements import optimizer_step
from torchmars.cluster import connection
from torchmars.config import (
    ActivationCheckpointConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchmars.metrics.throughput import GIB, Throughput, peak_flops
from torchmars.models import build_meta_model
from torchmars.models.gpt2 import GPT2Args
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, param_groups
from torchmars.parallel.parallel_model import ParallelModel

Step = Callable[[], None]
WARM_UP = 4  # the first of them compile
# Model, tokens of its vocabulary, and the batch of a step.
MODELS = [
    (ModelConfig(name="gpt2", size="small"), 50304, 16, 1024),
    (ModelConfig(name="llama", size="1b"), 128256, 4, 2048),
]
SMOKE = [
    (ModelConfig(name="gpt2", size="nano"), 256, 2, 64),
    (ModelConfig(name="llama", size="nano"), 256, 2, 64),
]


def ours(
    config: ModelConfig, vocab_size: int, batch: int, length: int, compiled: bool, rule: str
) -> Step:
    """Return a step of torchmars on one rank."""
    layout = connection.start(ParallelismConfig())
    training = TrainingConfig(
        global_batch_size=batch, seq_len=length, dtype="bfloat16", compile=compiled
    )
    model = ParallelModel(
        build_meta_model(config, vocab_size, length),
        ParallelismConfig(),
        training,
        ActivationCheckpointConfig(),
        layout,
        layout.device,
    )
    model.init_weights(0)
    groups = param_groups(model.whole, rule, lr=6e-4)
    for group in groups:
        group["params"] = [(name, model.weights[name]) for name, _ in group["params"]]
    optimizer = MARS(groups, max_grad_norm=1.0)
    windows = some_windows(vocab_size, batch, length)

    def step() -> None:
        model.backward([windows])
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(config: ModelConfig, vocab_size: int, batch: int, length: int, compiled: bool) -> Step:
    """Return a step of the plainest loop around the same model."""
    model = build_meta_model(config, vocab_size, length).to_empty(device=DEVICE)
    init_weights(model, 0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=6e-4, fused=True)
    windows = some_windows(vocab_size, batch, length).to(DEVICE)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.head(model(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def some_windows(vocab_size: int, batch: int, length: int) -> torch.Tensor:
    """Return made-up token ids [batch, length + 1], on the CPU as a loader has them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length + 1), generator=generator)


def model_rows(name: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield what each loop reaches on the model, eager and compiled."""
    for config, vocab_size, batch, length in SMOKE if smoke else MODELS:
        if config.name != name:
            continue
        flops = build_meta_model(config, vocab_size, length).flops_per_token()
        for compiled in (False, True):
            for rule in ("plain", "adamw", "mars-adamw", "mars-m"):
                if rule == "plain":
                    step = plain(config, vocab_size, batch, length, compiled)
                else:
                    step = ours(config, vocab_size, batch, length, compiled, rule)
                steps = measure(step, 2 if smoke else 20)
                del step
                speed = batch * length / statistics.median(steps["step, ms"]) * 1e3
                throughput = Throughput(0, batch * length, flops, DEVICE, ranks=1)
                yield {
                    "model": f"{config.name} {config.size}",
                    "loop": "plain loop, AdamW" if rule == "plain" else f"torchmars, {rule}",
                    "blocks": "compiled" if compiled else "eager",
                    "tokens/s": speed,
                    "MFU": throughput.mfu(speed),
                } | steps


def measure(step: Step, steps: int) -> dict[str, Any]:
    """Return the times of a step in milliseconds, and the peak memory in GiB.

    A step's time is that of `steps` steps, without waiting for the device between them, over their
    number: three times of it. The host's time is that until the call of a step returns.
    """
    for _ in range(WARM_UP):
        step()
    on_gpu, rounds, host = DEVICE.type == "cuda", [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer_step.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        optimizer_step.synchronize()
        rounds.append(1e3 * (time.perf_counter() - began) / steps)
        began = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - began))
    memory = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    return {"step, ms": rounds, "host, ms": host, "peak, GiB": memory}


def forget() -> None:
    """Free what the last contender has left."""
    gc.collect()
    torch.compiler.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def optimizer_rows(smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of each optimizer's step on GPT-2 small, side by side."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 320, "seq_len": 64}
    if not smoke:
        shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304, "seq_len": 1024}
    args = GPT2Args(**shape)
    bandwidth = optimizer_step.copy_bandwidth() if DEVICE.type == "cuda" else None
    for kind in optimizer_step.KINDS:
        rows = optimizer_step.measure(
            kind, args, 2 if smoke else 10, threads=1, few=False, cpu_time=False
        )
        for name, times, _, _ in rows:
            share = None
            if name == "mars-adamw" and bandwidth:
                share = optimizer_step.mars_traffic(args) / statistics.median(times) * 1e3
                share /= bandwidth
            ratios = [one / other for one, other in zip(times, rows[0][1])]
            yield {"of": kind, "step": name, "ms": times, "ratio": ratios, "of copy speed": share}
        forget()


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table. Of several values it shows median, least and most."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(map(cell, row.values())) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Return a value of a table as text."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"{statistics.median(value):.1f} ({min(value):.1f} to {max(value):.1f})"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def main() -> None:
    """Measure, print and write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=["optimizers", "gpt2", "llama"])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.smoke:
        sys.exit("error: no GPU is seen: --smoke runs the same code without one")
    began = time.monotonic()
    on_gpu = DEVICE.type == "cuda"
    machine = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "peak bfloat16 FLOP/s, by the data sheet": peak_flops(DEVICE),
    }
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n", flush=True)
    found: dict[str, Any] = dict(machine)
    for name in options.only:  # the optimizers first: before there are process groups
        rows = optimizer_rows if name == "optimizers" else functools.partial(model_rows, name)
        found[name] = []
        for row in rows(options.smoke):
            found[name].append(row)
            print(f"{time.monotonic() - began:4.0f} s: {row}", file=sys.stderr, flush=True)
            if options.file:  # also of a run that is ended early
                options.file.write_text(json.dumps(found, indent=1))
            forget()
        print(f"\n{table(found[name])}", flush=True)
    connection.stop()


if __name__ == "__main__":
    main()
