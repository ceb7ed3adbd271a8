"""Measure the time of an optimizer step, side by side in one interleaved run.

    python -m tests.measurements.optimizer_step

It prints two tables. Elements: all parameters of GPT-2 small, against `clip_grad_norm_` and torch's
fused AdamW, and against the MARS of timm and pytorch_optimizer where they are installed. Matrices:
hidden matrices, against `torch.optim.Muon`.
`--ranks 2` does all on FSDP shards of gloo ranks with one thread each, beside one rank with one
thread. `--only` takes some of the tables, `--few` the contenders of the project's goal.
`--only dtypes` prints another one: `mars-adamw` with momentum and last gradient in float32, and in
bfloat16.
`--cpu-time` counts the time that the process computes, and not that it waits for others on a busy
machine: take one thread with it. On a GPU it runs there, on one rank.

Times are medians of interleaved steps, ratios are medians of the ratios of each turn, with their
quartiles: a busy machine disturbs them less.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.ranks import run_ranks
from torchmars.config.gpt2 import GPT2Args
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, param_groups

Step = Callable[[], None]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ["elements", "matrices"]


def model_with_gradients(args: GPT2Args) -> nn.Module:
    """A model on the device, sharded where there are ranks, with a gradient for every parameter."""
    model = GPT2(args).to(DEVICE)
    init_weights(model, 0)
    if dist.is_initialized():
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


def clip_then(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    parameters = list(model.parameters())

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def elementwise_contenders(args: GPT2Args, few: bool) -> Iterator[tuple[str, Step, nn.Module]]:
    model = model_with_gradients(args)
    groups = [
        {key: group[key] for key in ("params", "lr", "betas", "weight_decay")}
        for group in param_groups(model, "adamw")
    ]
    yield (
        "clip_grad_norm_ + AdamW(fused)",
        clip_then(model, torch.optim.AdamW(groups, fused=True)),
        model,
    )
    for name in ("mars-adamw",) if few else ("mars-adamw", "mars-lion", "adamw"):
        model = model_with_gradients(args)
        yield name, MARS(param_groups(model, name), max_grad_norm=1.0).step, model
    model = model_with_gradients(args)
    yield (
        "mars-adamw, last_grad bfloat16",
        MARS(param_groups(model), max_grad_norm=1.0, last_grad_dtype=torch.bfloat16).step,
        model,
    )
    if not dist.is_initialized() and not few:  # the others do not know shards
        for name, build in others():
            model = model_with_gradients(args)
            yield (
                f"clip_grad_norm_ + {name}",
                clip_then(model, build(model.parameters(), lr=6e-3)),
                model,
            )


def others() -> Iterator[tuple[str, type]]:
    """The MARS of other packages, where they are installed."""
    for name, package, kind in (
        ("timm's Mars", "timm.optim", "Mars"),
        ("pytorch_optimizer's MARS", "pytorch_optimizer", "MARS"),
    ):
        try:
            yield name, getattr(importlib.import_module(package), kind)
        except ImportError:
            continue


def matrix_contenders(args: GPT2Args) -> Iterator[tuple[str, Step, nn.Module]]:
    def matrices() -> tuple[list[torch.Tensor], nn.Module]:
        model = model_with_gradients(args)
        return [
            p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
        ], model

    parameters, model = matrices()
    yield (
        "torch.optim.Muon",
        torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw").step,
        model,
    )
    for rule in ("mars-m", "muon"):
        parameters, model = matrices()
        yield rule, MARS([{"params": parameters, "rule": rule}]).step, model


def dtype_contenders(args: GPT2Args) -> Iterator[tuple[str, Step, nn.Module]]:
    narrow = {"momentum_dtype": torch.bfloat16, "last_grad_dtype": torch.bfloat16}
    for name, settings in (("float32", {}), ("bfloat16", narrow)):
        model = model_with_gradients(args)
        yield name, MARS(param_groups(model), max_grad_norm=1.0, **settings).step, model


def synchronize() -> None:
    torch.cuda.synchronize() if DEVICE.type == "cuda" else None
    dist.barrier() if dist.is_initialized() else None


def contenders(kind: str, args: GPT2Args, few: bool) -> Iterator[tuple[str, Step, nn.Module]]:
    if kind == "matrices":
        return matrix_contenders(args)
    if kind == "dtypes":
        return dtype_contenders(args)
    return elementwise_contenders(args, few)


def measure(
    kind: str, args: GPT2Args, steps: int, threads: int, few: bool, cpu_time: bool
) -> list[tuple]:
    """Return name, milliseconds of each step, peak memory and collectives of each contender.

    Memory is in bytes per parameter, beyond what is kept from step to step.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    named = list(contenders(kind, args, few))
    times: dict[str, list[float]] = {name: [] for name, _, _ in named}
    for number in range(steps + 2):
        for name, step, _ in named:
            step()  # not counted: it finds the caches and pages as the contender before left them
            synchronize()
            began = clock()
            step()
            synchronize()
            if number >= 2:  # compilation
                times[name].append((clock() - began) * 1e3)
    peaks = [
        peak_bytes(step) / sum(p.numel() for p in model.parameters()) for _, step, model in named
    ]
    rows = []
    for (name, step, _), peak in zip(named, peaks):
        with (
            CommDebugMode() as counted
        ):  # last, since torch.compile gives up on what it has seen under it
            step()
        rows.append((name, times[name], peak, counted.get_total_counts()))
    return rows


def peak_bytes(step: Step) -> int:
    """The most memory that a step has allocated at once."""
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    now = peak = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    for number in range(12):
        if number == 2:
            synchronize()
            began = time.perf_counter()
        target.copy_(source)
    synchronize()
    return 2 * 2**30 * 10 / (time.perf_counter() - began)


def mars_traffic(args: GPT2Args) -> int:
    """Return the bytes that a step of mars-adamw in float32 moves.

    It reads g and h; then it reads g, h, m, v and the weights, and writes all but g: 11 passes.
    """
    with torch.device("meta"):
        return 11 * 4 * sum(parameter.numel() for parameter in GPT2(args).parameters())


def show(title: str, rows: list[tuple], alone: list[tuple] | None = None) -> None:
    print(
        f"\n{title}, load {os.getloadavg()[0]:.1f}\n"
        "| step | ms | ratio | peak B/param | collectives |"
        + (" 1 rank ms | speed-up |" if alone else "")
    )
    print("|---" * (7 if alone else 5) + "|")
    for number, (name, times, extra, collectives) in enumerate(rows):
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(times, rows[0][1])], n=4)
        more, middle = "", statistics.median(times)
        if alone:
            of_one = statistics.median(alone[number][1])
            more = f" {of_one:.0f} | {of_one / middle:.2f} |"
        print(
            f"| {name} | {middle:.1f} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {extra:.2f} "
            f"| {collectives} |{more}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=KINDS)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    how = options.few, options.cpu_time
    small = GPT2Args(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, seq_len=1024)
    narrow = (
        small
        if DEVICE.type == "cuda"
        else GPT2Args(n_layer=6, n_head=6, n_embd=384, vocab_size=320, seq_len=128)
    )
    for kind in options.only:
        args = narrow if kind == "matrices" else small
        shape = f"{args.n_layer} layers of width {args.n_embd}"
        if options.ranks > 1:
            rows = run_ranks(measure, options.ranks, kind, args, options.steps, 1, *how)[0]
            show(
                f"{kind}, {shape}, {options.ranks} ranks with one thread each",
                rows,
                measure(kind, args, options.steps, 1, *how),
            )
        else:
            rows = measure(kind, args, options.steps, options.threads, *how)
            show(f"{kind}, {shape}, one rank on {DEVICE.type}", rows)
            if DEVICE.type == "cuda" and kind == "elements":
                bandwidth = copy_bandwidth()
                moved = mars_traffic(args) / (statistics.median(rows[1][1]) * 1e-3)
                print(
                    f"copy {bandwidth / 1e12:.2f} TB/s; mars-adamw moves 44 B/param at "
                    f"{moved / bandwidth:.0%} of it"
                )


if __name__ == "__main__":
    main()
