"""Draw the picture of docs/moe.md: validation losses of runs, and how busy their busiest expert is.

`python -m tests.measurements.moe_figure FILE RUN [RUN ...]`; it prints the last figures, too.
"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from torchmars.records.run import read_run

BUSIEST = "train/experts/busiest"
LAST = 10  # reports, of which the mean is printed


def main() -> None:
    file, *runs = map(Path, sys.argv[1:])
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    losses, busiest = figure.subplots(1, 2)
    for number, series in enumerate(read_run(run).series for run in runs):
        name, color = runs[number].name, f"C{number}"
        loss = series["validation/loss"]
        losses.plot(loss.steps, loss.values, color=color, label=name)
        said = f"{name}: validation loss {loss.values[-1]:.4f}"
        if BUSIEST in series:
            found = series[BUSIEST]
            busiest.plot(found.steps, found.values, color=color, label=name)
            said += f", busiest expert {sum(found.values[-LAST:]) / LAST:.2f}"
        print(said)
    losses.set_ylabel("validation loss, nats a byte")
    busiest.set_ylabel("busiest expert, tokens over the mean")
    for axes in (losses, busiest):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": file.name}):
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
