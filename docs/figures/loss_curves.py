"""Draw the losses of runs as an SVG file.

    python docs/figures/loss_curves.py FILE.svg RUN,RUN,... [RUN,RUN,... ...]

Each RUN is a run's folder. The runs of one argument share a panel. A line is the training loss of
single steps, as metrics.jsonl has it; a dot is a validation loss. The first step is left out: its
loss is that of random weights, far above all others.
"""

import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import tomli

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("none", "5 3", "2 2", "8 2 2 2")  # lines that lie on each other are all seen
PANEL_WIDTH, PANEL_HEIGHT = 440, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 40  # margins of a panel, in pixels
TICKS = 5
ROUND_TO = 0.5  # where the axis of losses begins and ends

Points = list[tuple[float, float]]


@dataclass
class Run:
    """The losses of a run, by step."""

    label: str
    train: Points
    validation: Points

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Return the losses in a run's folder."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        label = tomli.loads((folder / "config.toml").read_text())["optimizer"]["name"]
        train, validation = (
            [(line["step"], line[key]) for line in lines if line.get(key) is not None]
            for key in ("train/loss", "validation/loss")
        )
        return cls(label, train[1:], validation)


@dataclass
class Panel:
    """The place of a panel in the figure, and the ranges of its axes."""

    left: float
    last_step: float
    lowest: float
    highest: float

    def x(self, step: float) -> float:
        """Return the pixel of a step."""
        return self.left + LEFT + (PANEL_WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, loss: float) -> float:
        """Return the pixel of a loss."""
        part = (self.highest - loss) / (self.highest - self.lowest)
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * part

    def axes(self) -> list[str]:
        """Return the elements of grid and labels."""
        right, bottom = self.x(self.last_step), self.y(self.lowest)
        elements = []
        for tick in range(TICKS + 1):
            step = self.last_step * tick / TICKS
            loss = self.lowest + (self.highest - self.lowest) * tick / TICKS
            y = self.y(loss)
            elements += [
                f'<path d="M{self.x(0):.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>',
                text(self.x(0) - 6, y + 4, f"{loss:.1f}", "end"),
                text(self.x(step), bottom + 17, f"{step:.0f}", "middle"),
            ]
        elements.append(text((self.x(0) + right) / 2, bottom + 34, "step", "middle"))
        elements.append(text(self.x(0) + 4, TOP + 14, "loss", "start"))
        return elements

    def curve(self, run: Run, number: int) -> list[str]:
        """Return the elements of a run, the `number`th of its panel, and of its legend."""
        colour = COLOURS[number % len(COLOURS)]
        points = [f"{self.x(step):.1f},{self.y(loss):.1f}" for step, loss in run.train]
        dashes = f'stroke-dasharray="{DASHES[number % len(DASHES)]}"'
        elements = [f'<polyline fill="none" stroke="{colour}" stroke-width="1.6"']
        elements.append(f' {dashes} points="')
        elements += [" ".join(points[start : start + 7]) for start in range(0, len(points), 7)]
        elements.append('"/>')
        for step, loss in run.validation:
            place = f'cx="{self.x(step):.1f}" cy="{self.y(loss):.1f}"'
            elements.append(f'<circle {place} r="4.5" fill="{colour}"/>')
        x, y = self.x(self.last_step) - 150, TOP + 22 + 20 * number
        line = f'stroke="{colour}" stroke-width="2" {dashes}'
        elements.append(f'<path d="M{x:.1f} {y}h24" {line}/>')
        elements.append(text(x + 31, y + 4, run.label, "start"))
        return elements


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Return an element of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def draw(panels: list[list[Run]]) -> str:
    """Return the figure of panels of runs. All panels have the same axes."""
    runs = [run for panel in panels for run in panel]
    losses = [loss for run in runs for _, loss in run.train + run.validation]
    last_step = max(step for run in runs for step, _ in run.train)
    width = PANEL_WIDTH * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL_HEIGHT}"',
        f' width="{width}" height="{PANEL_HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    lowest = math.floor(min(losses) / ROUND_TO) * ROUND_TO
    highest = math.ceil(max(losses) / ROUND_TO) * ROUND_TO
    for number, panel_runs in enumerate(panels):
        panel = Panel(PANEL_WIDTH * number, last_step, lowest, highest)
        lines += panel.axes()
        for place, run in enumerate(panel_runs):
            lines += panel.curve(run, place)
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Draw the runs that the command line names."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    file, *panels = sys.argv[1:]
    runs = [[Run.read(Path(folder)) for folder in panel.split(",")] for panel in panels]
    Path(file).write_text(draw(runs))


if __name__ == "__main__":
    main()
