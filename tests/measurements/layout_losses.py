"""Print how far the losses of a run on each layout are from those on 1 rank.

It makes the table of docs/parallelism.md: python -m tests.measurements.layout_losses. The figure is
the largest difference of 20 training losses and 2 validation losses, as a part of them.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
from pathlib import Path

from tests.support.layout_losses import MODELS, losses_apart
from tests.support.layouts import LAYOUTS
from tests.support.tiny import write_text

RULES = ("mars-adamw", "mars-m", "mars-m, bfloat16")


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
