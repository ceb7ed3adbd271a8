"""Print how far the losses of a run on each layout are from those on 1 rank.

docs/parallelism.md has the largest: python -m tests.measurements.layout_losses. The figure is
the largest difference of 20 training losses and 2 validation losses, as a part of them.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
from pathlib import Path

from tests.support.layouts import LAYOUTS, by_ranks
from tests.support.ranks import run_ranks
from tests.support.small_runs import run_tables
from tests.support.tiny import metrics, train_here, write_text

MODELS, RULES = ("GPT-2", "Llama"), ("mars-adamw", "mars-m", "mars-m, bfloat16")


def main() -> None:
    """Train every run of the table and print it in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", help="names of layouts; none: all")
    layouts = parser.parse_args().layouts or [name for name in LAYOUTS if name != "1 rank"]
    cases = list(itertools.product(MODELS, RULES))
    with tempfile.TemporaryDirectory() as folder, quiet():
        write_text(Path(folder))
        apart = losses_apart(Path(folder), cases, layouts)
    print("| layout | " + " | ".join(f"{model}, {rule}" for model, rule in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for layout in layouts:
        figures = [f"{apart[*case, layout]:.0e}" for case in cases]
        print(f"| {layout} | " + " | ".join(figures) + " |")


def losses_apart(
    folder: Path, cases: list[tuple[str, str]], layouts: list[str]
) -> dict[tuple[str, str, str], float]:
    """Train each of `cases`, pairs of a model and a rule, on 1 rank and on each of `layouts`.

    Returns the largest difference of a training or validation loss from that on 1 rank, as a part
    of it, by model, rule and layout. The text is in `folder`.
    """
    for size, alike in by_ranks(["1 rank", *layouts]).items():
        run_ranks(
            train_here, size, *(run_tables(folder, *c, each) for each in alike for c in cases)
        )
    apart = {}
    for case in cases:
        expected = losses(run_tables(folder, *case, "1 rank"))
        for layout in layouts:
            found = losses(run_tables(folder, *case, layout))
            assert found.keys() == expected.keys()
            apart[*case, layout] = max(abs(found[at] / expected[at] - 1) for at in expected)
    return apart


def losses(tables: dict) -> dict[tuple[str, int], float]:
    """Return the losses of a run by what they are of and step."""
    return {
        (name, step): value
        for name in ("train/loss", "validation/loss")
        for step, value in metrics(tables, name).items()
    }


@contextlib.contextmanager
def quiet():
    """Let this process and the ranks that it starts print nothing."""
    kept = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)


if __name__ == "__main__":
    main()
