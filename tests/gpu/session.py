"""What a GPU can do, in eight commands of at most nine minutes each, the most telling first.

Number 7 is for a GPU that is lent for minutes: in less than four it measures what a user asks of
one GPU first.

    tests/gpu/session.sh NUMBER [--smoke]

Each part of a command is a process that is ended after its seconds. Its rows are printed, and added
to gpu-NUMBER.jsonl, as they come. Parts find in torch.compile's cache what others have compiled.
`--smoke` runs the same code in small on a machine without a GPU, in one process, where its numbers
mean nothing.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu import copies, determinism, models, optimizers, ranks, runs
from tests.gpu.device import ON_GPU
from torchmars.cluster import connection

Row = dict[str, Any]


class Part(NamedTuple):
    """A part of a command."""

    name: str
    seconds: int
    """After which it is ended."""
    rows: Callable[[], Iterator[Row]]
    """Measures, and yields what it has found."""


def chained(*measured: Callable[[], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
    """Return what yields the rows of all, in one process: to import torch takes seconds."""
    return lambda: itertools.chain.from_iterable(rows() for rows in measured)


COMMANDS = {
    1: [
        Part("machine", 40, runs.machine),
        Part("endings", 240, runs.endings),
        Part("tests", 240, runs.tests),
    ],
    2: [
        Part("elements", 260, optimizers.elements),
        Part("matrices", 260, optimizers.matrices),
    ],
    3: [
        Part("GPT-2 small", 340, models.gpt2_small),
        Part("profile", 100, models.profile),
        Part("loss", 80, models.losses),
    ],
    4: [
        Part("Llama 1B", 240, models.llama_1b),
        Part("Newton-Schulz", 60, models.newton_schulz),
        Part("a slice of Llama 8B", 220, models.llama_8b_slice),
    ],
    5: [
        Part("as it is", 260, partial(determinism.rows, False)),
        Part("deterministic", 260, partial(determinism.rows, True)),
    ],
    6: [Part("layouts", 520, ranks.rows)],
    7: [
        Part("GPT-2 small in short", 135, chained(runs.machine, models.gpt2_small_in_short)),
        Part("steps alone", 45, optimizers.in_short),
        Part("products", 45, chained(models.newton_schulz_of_gpt2, models.losses)),
    ],
    8: [Part("copies", 300, copies.rows)],
}


def run_part(command: list[str], seconds: float) -> int | None:
    """Run a command; return its exit code, or None if it took longer and was ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also what it has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(number: int, part: Part, file: Path) -> None:
    """Print the rows of a part, and add them to `file`, as they come."""
    began = time.monotonic()
    for row in part.rows():
        line = json.dumps({"part": part.name, **row})
        print(f"{time.monotonic() - began:4.0f} s: {line}", flush=True)
        with file.open("a") as lines:
            print(line, file=lines)
    connection.stop()


def main() -> None:
    """Run the parts of a command, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, choices=COMMANDS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", help="this one alone, in this process")
    options = parser.parse_args()
    if options.smoke == ON_GPU:
        sys.exit("error: --smoke is for machines without a GPU, and needed there")
    file = Path(f"gpu-{options.number}.jsonl")
    for part in COMMANDS[options.number]:
        if options.smoke or options.part == part.name:
            measure(options.number, part, file)
        elif not options.part:
            command = [sys.executable, "-u", "-m", "tests.gpu.session", str(options.number)]
            code = run_part([*command, "--part", part.name], part.seconds)
            if code != 0:
                end = f"ended after {part.seconds} s" if code is None else f"exit code {code}"
                print(f"{part.name}: {end}", flush=True)


if __name__ == "__main__":
    main()
