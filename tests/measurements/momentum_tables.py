"""Print the tables of docs/momentum.md, or draw its figure, from docs/studies/momentum.jsonl.

python -m tests.measurements.momentum_tables [FIGURE.svg]
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torchmars.comparison.statistics import difference
from torchmars.reports.plots import STYLE

FILE = Path(__file__).parents[2] / "docs/studies/momentum.jsonl"
TELEMETRY = FILE.with_name("momentum_telemetry.json")  # step, cosine, correction, clipped
NAMES = {"muon": "Muon", "mars-m": "MARS-M", "mars-shampoo": "MARS-Shampoo"}
NAMES |= {"adamw": "AdamW", "mars-adamw": "MARS-AdamW"}

PUBLISHED = "MARS-M µ 0.95, γ 0.025"

Row = dict[str, Any]
Losses = dict[str, dict[float, dict[int, float]]]  # of each optimizer: by rate, by seed


def trials(setting: str, *, options: bool | None = None, **having: Any) -> Iterator[Row]:
    """Yield the trials of a setting: of constant gamma unless it says otherwise.

    `options` says whether matrices have the two options of best.toml.
    """
    having = {"setting": setting, "final_gamma": None} | having
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        found = row["optimizer"].get("equilibrate", False)
        if all(row.get(key) == value for key, value in having.items()):
            if options is None or found == options:
                yield row


def name_of(optimizer: Row) -> str:
    """Return what tables call an optimizer."""
    (beta1, beta2), gamma = optimizer["betas"], optimizer.get("gamma")
    matrices = optimizer["name"] not in ("adamw", "mars-adamw")
    words = [f"{NAMES[optimizer['name']]} " + (f"µ {beta1:g}" if matrices else f"β {beta1:g}")]
    if not matrices:
        words[0] += f", {beta2:g}"
    words += [] if gamma is None else [f"γ {gamma:g}"]
    words += ["clip 0"] if optimizer.get("clip", 1) == 0 else []
    return ", ".join(words)


def losses_of(rows: Iterable[Row], name: Callable[[Row], str] = name_of) -> Losses:
    """Return the final losses of trials, by what `name` calls their optimizer, rate and seed."""
    found: Losses = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        optimizer = row["optimizer"]
        found[name(optimizer)][optimizer["lr"]][row["seed"]] = row["losses"][-1][1]
    return found


def best_rate(of_rates: dict[float, dict[int, float]], seeds: int = 1) -> float:
    """Return the rate of the lowest mean over its first `seeds`."""
    means = {lr: fmean(list(of_seeds.values())[:seeds]) for lr, of_seeds in of_rates.items()}
    return min(means, key=means.__getitem__)


def in_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def gammas_of(mu: float, parts: Iterable[float]) -> list[float]:
    """Return the published gamma, and these parts of 1 - mu, where Nesterov's Muon lies."""
    return [0.025, *(round(part * (1 - mu), 6) for part in parts)]


def points_of(mu: float, parts: Iterable[float]) -> list[str]:
    """Return the names of Muon and of MARS-M at these gammas."""
    return [f"Muon µ {mu:g}", *(f"MARS-M µ {mu:g}, γ {each:g}" for each in gammas_of(mu, parts))]


def plane() -> list[str]:
    """The best loss over three rates at each point of the plane, with the clip and without."""
    losses = losses_of(trials("books", options=True, products="highest", seed=0))

    def shown(point: str) -> str:
        found = [losses[name] for name in (point, f"{point}, clip 0") if name in losses]
        return " / ".join(f"{each[best_rate(each)][0]:.4f}" for each in found)

    rows = [[f"{mu:g}", *map(shown, points_of(mu, (1, 2, 4)))] for mu in (0.8, 0.9, 0.95, 0.98)]
    return in_table(["µ", "Muon", "γ 0.025", "γ 1 − µ", "γ 2 (1 − µ)", "γ 4 (1 − µ)"], rows)


def with_seeds(losses: Losses, rates: Sequence[float], against: str, seeds: int) -> list[str]:
    """A row for each optimizer: the mean at each rate, and at the best one how it compares."""
    best = {name: of_rates[best_rate(of_rates, seeds)] for name, of_rates in losses.items()}
    rows = []
    for name in sorted(best, key=lambda name: fmean(best[name].values())):
        found = list(best[name].values())
        compared = difference(name, found, against, list(best[against].values())).loss
        interval = "" if name == against else f"{compared.low:+.4f} to {compared.high:+.4f}"
        means = (list(losses[name][lr].values()) if lr in losses[name] else None for lr in rates)
        shown = ("" if each is None else f"{fmean(each[:seeds]):.4f}" for each in means)
        rows.append([name, *shown, f"{fmean(found):.4f}", f"{stdev(found):.4f}", interval])
    heads = ["optimizer", *(f"lr {lr:g}" for lr in rates)]
    return in_table([*heads, "at the best", "spread", f"difference from {against}"], rows)


def five_seeds() -> list[str]:
    """Three seeds at three rates, five at the best."""
    losses = losses_of(trials("books", products="high"))
    return with_seeds(losses, (4e-3, 8e-3, 1.6e-2), "Muon µ 0.9", 3)


def against_published() -> list[str]:
    """Five seeds at 8e-3, beside MARS-M as published."""
    losses = losses_of(trials("books", products="high"))
    published = list(losses[PUBLISHED][8e-3].values())
    rows = []
    for name, of_rates in losses.items():
        if name != PUBLISHED:
            found = difference(name, list(of_rates[8e-3].values()), PUBLISHED, published).loss
            rows.append([name, f"{found.mean:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}"])
    return in_table(["optimizer", "difference from published", "95% interval"], sorted(rows))


def along_the_run() -> list[str]:
    """The validation loss during the run at 8e-3, means of five seeds."""
    curves: dict[str, list[dict[int, float]]] = defaultdict(list)
    for row in trials("books", products="high"):
        if row["optimizer"]["lr"] == 8e-3:
            curves[name_of(row["optimizer"])].append({step: loss for step, loss in row["losses"]})
    steps = 100, 200, 500, 850, 1230
    rows = [
        [name, *(f"{fmean(curve[step] for curve in found):.3f}" for step in steps)]
        for name, found in sorted(curves.items())
    ]
    return in_table(["optimizer", *(f"step {step}" for step in steps)], rows)


def larger() -> list[str]:
    """The same at four times the size."""
    losses = losses_of(trials("books, 4 x size"))
    return with_seeds(losses, (2e-3, 4e-3, 8e-3), "Muon µ 0.9", 3)


def batch() -> list[str]:
    """Losses with four times the batch, as many steps and one seed."""
    losses = losses_of(trials("books, 4 x batch"))
    rows = [
        [f"{mu:g}", *(f"{losses[name][8e-3][0]:.4f}" for name in points_of(mu, (1, 2)))]
        for mu in (0.9, 0.95, 0.98)
    ]
    return in_table(["µ", "Muon", "γ 0.025", "γ 1 − µ", "γ 2 (1 − µ)"], rows)


def other_rules() -> list[str]:
    """AdamW, MARS-AdamW and MARS-Shampoo: the best of three rates with one seed."""
    rows = []
    rules = ("adamw", "mars-adamw", "mars-shampoo")
    chosen = [
        row
        for row in trials("books", products="highest", seed=0)
        if row["optimizer"]["name"] in rules
    ]
    losses = losses_of(chosen)
    for name in sorted(losses, key=lambda name: losses[name][best_rate(losses[name])][0]):
        lr = best_rate(losses[name])
        rows.append([name, f"{lr:g}", f"{losses[name][lr][0]:.4f}"])
    return in_table(["optimizer", "best lr", "final loss"], rows)


def other_rules_seeds() -> list[str]:
    """Three seeds of the best of each of them."""
    losses = losses_of(trials("books", products="highest"))
    names = "MARS-Shampoo µ 0.9, γ 0.2", "MARS-AdamW β 0.9, 0.99, γ 0.025", "AdamW β 0.9, 0.99"
    return each_seed({name: losses[name] for name in names}, at_least=3)


def each_seed(losses: Losses, at_least: int = 1) -> list[str]:
    """A row for each optimizer and rate that has so many seeds."""
    rows = []
    for name, of_rates in losses.items():
        for lr, of_seeds in of_rates.items():
            if len(of_seeds) >= at_least:
                found = list(of_seeds.values())
                each = ", ".join(f"{loss:.4f}" for loss in found)
                rows.append([name, f"{lr:g}", each, f"{fmean(found):.4f}"])
    return in_table(["optimizer", "lr", "seeds", "mean"], rows)


def options() -> list[str]:
    """The best of both rules without the two options."""
    losses = losses_of(trials("books", options=False, products="highest"))
    chosen = {name: each for name, each in losses.items() if name.startswith(("Muon", "MARS-M"))}
    return with_seeds(chosen, (4e-3, 8e-3, 1.6e-2), "Muon µ 0.9", 3)


def quickstart() -> list[str]:
    """The quickstart: one seed at three rates, and at the best one all of them."""
    losses = losses_of(trials("quickstart"))
    several = {
        name: of_rates
        for name, of_rates in losses.items()
        if len(of_rates[best_rate(of_rates)]) > 1
    }
    return with_seeds(several, (1e-2, 2e-2, 3e-2), "Muon µ 0.85", 1)


def quickstart_on_books() -> list[str]:
    """The quickstart's model, batch and length on the books, three seeds: `torchmars train`."""
    return each_seed(losses_of(trials("quickstart on books")))


def schedules() -> list[str]:
    """MARS-M with a gamma that moves on a line, three seeds."""
    rows = []
    for first, last in ((0.1, 0.0), (0.2, 0.0), (0.0, 0.1)):
        found = [
            row["losses"][-1][1]
            for row in trials("books", final_gamma=last)
            if row["optimizer"]["gamma"] == first
        ]
        rows.append([f"{first:g} to {last:g}", f"{fmean(found):.4f}", f"{stdev(found):.4f}"])
    return in_table(["γ", "mean", "spread"], rows)


def of_telemetry() -> list[str]:
    """Means of what two runs report of their matrices, while the rate is high and after."""
    rows = []
    for name, reports in json.loads(TELEMETRY.read_text()).items():
        for first, last in ((50, 250), (300, 1230)):
            some = [values for step, *values in reports if first <= step <= last]
            means = (f"{fmean(column):.2f}" for column in zip(*some))
            rows.append([name, f"{first} to {last}", *means])
    return in_table(["run", "steps", "cosine", "correction", "clipped"], rows)


TABLES = [
    plane,
    five_seeds,
    against_published,
    along_the_run,
    options,
    larger,
    batch,
    other_rules,
    other_rules_seeds,
    quickstart,
    quickstart_on_books,
    schedules,
    of_telemetry,
]


def draw(file: Path) -> None:
    """Draw the loss over gamma for each momentum and rate, with one seed and the clip."""
    from matplotlib import pyplot

    pyplot.rcParams |= STYLE | {"svg.hashsalt": "momentum", "svg.fonttype": "none"}
    losses = losses_of(trials("books", options=True, products="highest", seed=0))
    rates = 4e-3, 8e-3, 1.6e-2
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, lr in zip(axes, rates):
        for mu, color in zip((0.8, 0.9, 0.95, 0.98), ("C0", "C1", "C2", "C3")):
            gammas = sorted(set(gammas_of(mu, (1, 2, 4))))
            values = [losses[f"MARS-M µ {mu:g}, γ {gamma:g}"][lr][0] for gamma in gammas]
            axis.plot(gammas, values, "o-", color=color, markersize=3, label=f"MARS-M µ {mu:g}")
            muon = losses[f"Muon µ {mu:g}"][lr][0]
            axis.plot([1 - mu], [muon], "D", color=color, fillstyle="none")
        axis.set(xscale="log", xlabel="γ", title=f"lr {lr:g}", ylim=(1.44, 1.6))
        ticks = 0.025, 0.05, 0.1, 0.2, 0.4, 0.8
        axis.set_xticks(ticks, [f"{each:g}" for each in ticks], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss")
    axes[0].plot([], [], "D", color="gray", fillstyle="none", label="Muon, at γ = 1 − µ")
    axes[2].legend(*axes[0].get_legend_handles_labels(), fontsize=7, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Print the tables, or draw the figure where a file is named."""
    if sys.argv[1:]:
        draw(Path(sys.argv[1]))
        return
    for table in TABLES:
        print(f"{table.__name__}: {table.__doc__}", *table(), "", sep="\n")


if __name__ == "__main__":
    main()
