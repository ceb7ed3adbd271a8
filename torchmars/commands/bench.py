"""Measure how fast a config trains on this machine."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from torchmars.benchmark.findings import MeasuredConfig, bench_results, bench_table, ratios
from torchmars.benchmark.measure import has_shards, measure, ranks_of
from torchmars.config import ResolvedConfig
from torchmars.config.fields import Positive
from torchmars.config.load import load_command, load_config, require_config
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.result_files import check_results_file, write_results
from torchmars.core.words import counted

PROG = "torchmars bench"


@dataclass
class Bench:
    """Measure how fast a config trains on this machine.

    Starts the run itself, with its ranks, data and optimizer, in a folder that is deleted again.
    It validates, saves and tracks nothing. Where the shards of the config's data are not there it
    reads random tokens. Prints tokens per second, the use of the GPUs (MFU), the time of a step by
    phases, and the peak memory.
    """

    steps: Positive = 20
    """Steps that are measured."""
    warmup: Positive = 10
    """Steps before them. Times are read every n steps, n a common divisor of both numbers."""
    against: str | None = None
    """Measure another config too, in alternation, and print the ratio: files and options in quotes,
    such as "quickstart.toml --training.compile true"."""
    rounds: Positive | None = None
    """Runs of each config. Default: 1, with --against 3."""
    json: Path | None = None
    """Write the results to this file too."""


def main() -> None:
    """Print how fast the config trains that the command line names."""
    with exit_on_user_error():
        options, config, arguments = load_command(Bench, sys.argv[1:], PROG)
        require_config(arguments, PROG)
        check_results_file(options.json)
        configs = [(shlex.join(arguments), config)]
        if options.against is not None:
            other = load_config(against_arguments(options.against), PROG)
            configs.append((options.against, other))
        measured = [
            MeasuredConfig(name, arguments, ranks_of(each), data_of(each))
            for name, (arguments, each) in zip(["A", "B"] if len(configs) == 2 else [""], configs)
        ]
        bench(options, measured, [each for _, each in configs])


def bench(options: Bench, measured: list[MeasuredConfig], configs: list[ResolvedConfig]) -> None:
    """Measure `configs` in alternation; print and write the results."""
    from torchmars.core.device import describe_machine  # it takes torch

    machine = describe_machine()
    say(*bench_heading(options, measured, machine))
    rounds = options.rounds or (1 if len(measured) == 1 else 3)
    pairs = list(zip(measured, configs))
    for number in range(rounds):
        # The order alternates, so that changes over time count for both.
        for one, config in pairs[:: 1 - 2 * (number % 2)]:
            found = measure(config, options.warmup, options.steps, one.ranks)
            one.rounds.append(found)
            if rounds > 1:
                which = f"round {number + 1} of {rounds}, {one.name}"
                say(f"{which}: {found.tokens_per_second:,.0f} tokens/s")
    say("", *bench_table(measured))
    if len(measured) == 2:
        say(f"\nA / B, tokens/s, round by round: {ratios(*measured).describe('.3f')}")
    if options.json is not None:
        results = bench_results(measured, machine, options.warmup, options.steps)
        write_results(options.json, results)


def data_of(config: ResolvedConfig) -> str:
    """Return the data that a config is measured on, in words."""
    if has_shards(config):
        return f"the shards in {config.data.path}"
    return f"random tokens, since {config.data.path} has no shards"


def against_arguments(text: str) -> list[str]:
    """Return the files and options in the text of --against. Raises `UserError`."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--against: cannot read {text!r}: {error}") from None
    if not arguments or arguments[0].startswith("--"):
        raise UserError("--against names no config: it has files and options of the other one")
    return arguments


def bench_heading(
    options: Bench, measured: list[MeasuredConfig], machine: dict[str, str | int | float]
) -> list[str]:
    """Return lines on the measurement before it starts."""
    lines = labelled(
        "machine",
        f"{machine['device']}, {machine['cores']} cores, of which {machine['load']} "
        f"were busy in the last minute; torch {machine['torch']}",
    )
    for each in measured:
        where = f"{counted(each.ranks, 'rank')}, data: {each.data}"
        lines += labelled(each.name or "config", each.arguments, where)
    return [
        *lines,
        *labelled("steps", f"{options.steps}, after {options.warmup} that do not count"),
    ]
