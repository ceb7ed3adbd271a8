"""Measure how fast a config trains on this machine."""

import shlex
import sys
from dataclasses import dataclass

from torchmars.benchmark.measure import measure, ranks_of
from torchmars.config.fields import Positive
from torchmars.config.load import load_command, require_config
from torchmars.core.console import labelled, say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.words import counted, number_or_dash, table
from torchmars.records.lines import Row

PROG = "torchmars bench"


@dataclass
class Bench:
    """Measure how fast a config trains on this machine.

    Starts a run itself, with its ranks, optimizer and loader, on random tokens in a folder that is
    deleted again. It validates, saves and tracks nothing. Prints tokens per second, the use of the
    GPUs (MFU), the time of a step by phases, and the peak memory.
    """

    steps: Positive = 20
    """Steps that are measured, after as many that are not."""


def main() -> None:
    """Print how fast the config trains that the command line names."""
    with exit_on_user_error():
        options, config, arguments = load_command(Bench, sys.argv[1:], PROG)
        require_config(arguments, PROG)
        from torchmars.core.device import describe_machine, visible_gpus  # it takes torch

        ranks = ranks_of(config, len(visible_gpus()) or 2)
        say(
            *labelled("machine", describe_machine()),
            *labelled("config", shlex.join(arguments), counted(ranks, "rank")),
            *labelled("steps", f"{options.steps}, after {options.steps} that do not count"),
        )
        found = measure(config, options.steps, ranks)
        say("", *bench_table(found, config.training.tokens_per_step))


def bench_table(found: Row, tokens_per_step: int) -> list[str]:
    """Return lines of the metrics of a run: rate, use of the GPUs, time of a step, memory."""
    rate = found["train/tokens_per_second"]
    step = 1e3 * tokens_per_step / rate
    phases = [name for name in found if name.startswith("train/") and name.endswith("_ms")]
    rows = [
        ["tokens/s", f"{rate:,.0f}"],
        ["mfu", number_or_dash(found.get("train/mfu"), ".1%")],
        ["step, ms", f"{step:,.1f}"],
        *(
            [f"  {name[6:-3]}", f"{found[name]:,.1f} ({found[name] / step:4.0%})"]
            for name in sorted(phases, key="train/other_ms".__eq__)
        ),
        ["peak memory of rank 0, GiB", f"{found['train/memory_gib']:.2f}"],
    ]
    return table(rows, right=[1])
