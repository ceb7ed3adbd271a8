"""Run the trials of docs/momentum.md: momentum, variance reduction and clip of the matrix rules.

    python -m tests.measurements.momentum_study TEXTS OUT.jsonl STAGE ... [--smoke]

TEXTS is a folder with books.npz and stdlib.npz, the splits `train` and `validation` of a prepared
corpus of bytes. All trials of a stage are trained at once (`trials_together`). Each is a line of
OUT.jsonl.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.measurements.momentum_tables import gammas_of
from tests.measurements.trials_together import Text, kind_of, train_together
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.config.toml_files import SHIPPED, read_toml

Optimizer = dict[str, Any]  # an [optimizer] section
Row = dict[str, Any]  # a trial and its losses: a line of the file

OPTIONS = {"equilibrate": True, "renormalize": True}
RATES = 4e-3, 8e-3, 1.6e-2


class Setting(NamedTuple):
    """What the trials of a stage train on, beside the optimizer."""

    name: str
    text: str
    config: str
    changes: dict[str, dict[str, Any]]


BOOKS = Setting("books", "books", "compare_books.toml", {})
LARGER = Setting(
    "books, 4 x size", "books", "compare_books.toml", {"model": {"n_embd": 224, "n_head": 8}}
)
LARGER_BATCH = Setting(
    "books, 4 x batch",
    "books",
    "compare_books.toml",
    {"training": {"global_batch_size": 128}},
)
QUICKSTART = Setting("quickstart", "stdlib", "quickstart.toml", {})


def matrix_rule(name: str, mu: float, lr: float, **others: Any) -> Optimizer:
    """Return the section of a matrix rule with momentum `mu`."""
    return {"name": name, "lr": lr, "betas": [mu, 0.99], "weight_decay": 0.1, **OPTIONS, **others}


def plane(
    mus: Iterable[float],
    gammas: Sequence[float],
    lrs: Sequence[float],
    clips: Sequence[float] = (1.0,),
) -> list[Optimizer]:
    """Return Muon and MARS-M over momenta and rates; a clip of 0 is none.

    `gammas` are in parts of 1 - mu, where Nesterov's Muon lies. The published 0.025 is added.
    """
    found = []
    for mu, lr in itertools.product(mus, lrs):
        found.append(matrix_rule("muon", mu, lr))
        each = sorted(set(gammas_of(mu, gammas)))
        found += [
            matrix_rule("mars-m", mu, lr, gamma=gamma, clip=clip)
            for gamma, clip in itertools.product(each, clips)
        ]
    return found


def other_rules() -> list[Optimizer]:
    """Return AdamW, MARS-AdamW and MARS-Shampoo over first betas, gammas and rates."""
    found: list[Optimizer] = []
    for beta, lr in itertools.product((0.9, 0.95), RATES):
        for second in (0.95, 0.99):
            found.append({"name": "adamw", "lr": lr, "betas": [beta, second], "weight_decay": 0.1})
        for gamma in (0.025, 0.1, 0.2):
            corrected = {"betas": [beta, 0.99], "gamma": gamma, "weight_decay": 0.01}
            found.append({"name": "mars-adamw", "lr": 2 * lr, **corrected})
            found.append({"name": "mars-shampoo", "lr": 4 * lr, **corrected, **OPTIONS})
    return found


class Study:
    """Runs stages, and adds what they find to a file."""

    def __init__(self, texts: Path, out: Path, smoke: bool) -> None:
        self.texts, self.out, self.smoke = texts, out, smoke
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[Row] = []
        if out.exists():
            self.rows = [json.loads(line) for line in out.read_text().splitlines()]

    def run(
        self, setting: Setting, optimizers: Iterable[Optimizer], seeds: Iterable[int], **others: Any
    ) -> None:
        """Train each optimizer with each seed, but for trials that are done."""
        self.run_pairs(setting, itertools.product(optimizers, seeds), **others)

    def run_pairs(
        self, setting: Setting, pairs: Iterable[tuple[Optimizer, int]], **others: Any
    ) -> None:
        """Train these optimizers with these seeds, but for trials that are done."""
        computed = {
            "device": self.device.type,
            "products": torch.get_float32_matmul_precision(),  # "high": in TF32
        }
        trials: list[Row] = [
            {"setting": setting.name, "optimizer": optimizer, "seed": seed, **others, **computed}
            for optimizer, seed in pairs
        ]
        done = [{key: row[key] for key in row if key != "losses"} for row in self.rows]
        trials = [each for n, each in enumerate(trials) if each not in done + trials[:n]]
        trials.sort(key=lambda each: str(kind_of_section(each["optimizer"])))
        began = time.monotonic()
        configs = [config_of(setting, each, self.smoke) for each in trials]
        curves = train_together(configs, self.text(setting.text), self.device) if trials else []
        print(f"{setting.name}: {len(trials)} trials, {time.monotonic() - began:.0f} s", flush=True)
        rows = [{**each, "losses": rounded(curve)} for each, curve in zip(trials, curves)]
        self.rows += rows
        with self.out.open("a") as lines:
            lines.writelines(f"{json.dumps(row)}\n" for row in rows)

    def text(self, name: str) -> Text:
        """Return a corpus on the device."""
        with np.load(self.texts / f"{name}.npz") as arrays:
            train, validation = (
                torch.from_numpy(arrays[each]).to(self.device) for each in ("train", "validation")
            )
        return Text(train, validation, vocab_size=257)

    def best(self, setting: Setting, count: int, **having: Any) -> list[Optimizer]:
        """Return the sections of the lowest losses, of each but its rate one, `having` these.

        Of the trials with the first seed, products in float32 and a constant gamma.
        """
        of_point: dict[str, tuple[float, Optimizer]] = {}
        for row in self.rows:
            section = row["optimizer"]
            alike = all(section.get(key) == value for key, value in having.items())
            plain = row["products"] == "highest" and "final_gamma" not in row
            if row["setting"] == setting.name and row["seed"] == 0 and plain and alike:
                point = str({**section, "lr": 0})
                loss = row["losses"][-1][1]
                found = (math.inf if math.isnan(loss) else loss), section
                of_point[point] = min(of_point.get(point, found), found, key=lambda each: each[0])
        return [section for _, section in sorted(of_point.values(), key=lambda e: e[0])[:count]]


def kind_of_section(section: Optimizer) -> tuple[Any, ...]:
    """Return what sections have in common whose trials share their updates."""
    return kind_of({**section, "rule": section["name"]})


def config_of(setting: Setting, trial: Row, smoke: bool) -> ResolvedConfig:
    """Return the config of a trial."""
    tables = read_toml(SHIPPED / setting.config)
    tables["data"]["source"] = "text:unread"
    tables["optimizer"] = trial["optimizer"]
    tables["run"] |= {"seed": trial["seed"]}
    tables["validation"]["interval"] = 50
    for section, changes in setting.changes.items():
        tables[section] |= changes
    if "final_gamma" in trial:
        tables["schedule"] |= {"gamma": "linear", "final_gamma": trial["final_gamma"]}
    if smoke:
        tables["training"] |= {"steps": 2, "global_batch_size": 2}
        tables["schedule"]["warmup_steps"] = 1
        tables["validation"] |= {"windows": 2}
    return config_from_tables(tables, setting.name)


def rounded(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a curve with as many digits as tell anything."""
    return [(step, round(loss, 5)) for step, loss in curve]


def without_options(section: Optimizer) -> Optimizer:
    """Return a section without the two options."""
    return {key: value for key, value in section.items() if key not in OPTIONS}


def at_rates(sections: Iterable[Optimizer], rates: Iterable[float]) -> Iterator[Optimizer]:
    """Yield each section with each rate."""
    return ({**each, "lr": lr} for each, lr in itertools.product(sections, list(rates)))


def stage_plane(study: Study) -> None:
    """Try the plane of momentum and gamma with one seed; other rules' settings too."""
    of_books = plane((0.8, 0.9, 0.95, 0.98), (1, 2, 4), RATES, clips=(1.0, 0.0))
    study.run(BOOKS, [*of_books, *other_rules()], [0])
    rules = "adamw", "mars-adamw", "mars-shampoo"
    others = [section for name in rules for section in study.best(BOOKS, 1, name=name)]
    [best], [muon] = (study.best(BOOKS, 1, name=name) for name in ("mars-m", "muon"))
    plain = map(without_options, (best, muon))
    study.run(BOOKS, [*others, *at_rates(plain, RATES)], range(3))


def stage_quickstart(study: Study) -> None:
    """Try the quickstart's own plane and rates, then five seeds of the best."""
    rates = 1e-2, 2e-2, 3e-2
    adamw = [each for each in other_rules() if each["name"] == "adamw"]
    study.run(QUICKSTART, [*plane((0.8, 0.85, 0.9, 0.95), (1, 2, 3), rates), *adamw], [0])
    counts = {"mars-m": 5, "muon": 2, "adamw": 1}
    best = [each for name, n in counts.items() for each in study.best(QUICKSTART, n, name=name)]
    study.run(QUICKSTART, best, range(5))


def stage_quickstart_adamw(study: Study) -> None:
    """Try lower rates of AdamW in the quickstart, then three seeds of the best."""
    [best] = study.best(QUICKSTART, 1, name="adamw")
    study.run(QUICKSTART, at_rates([best], (1e-3, 2e-3)), [0])
    study.run(QUICKSTART, study.best(QUICKSTART, 1, name="adamw"), range(3))


def stage_schedules(study: Study) -> None:
    """Let gamma fall to 0, from once and twice the best one, and rise from 0."""
    [best] = study.best(BOOKS, 1, name="mars-m")
    study.run(BOOKS, [best, {**best, "gamma": 2 * best["gamma"]}], range(3), final_gamma=0.0)
    study.run(BOOKS, [{**best, "gamma": 0.0}], range(3), final_gamma=best["gamma"])


def contenders() -> list[Optimizer]:
    """Return the best points of the plane, without those that are Muon by another name."""
    mars = [(0.9, 0.1, 1.0), (0.9, 0.2, 1.0), (0.95, 0.1, 1.0), (0.9, 0.1, 0.0), (0.95, 0.025, 1.0)]
    return [
        *(matrix_rule("mars-m", mu, 8e-3, gamma=gamma, clip=clip) for mu, gamma, clip in mars),
        *(matrix_rule("muon", mu, 8e-3) for mu in (0.9, 0.95)),
    ]


def stage_seeds(study: Study) -> None:
    """Give the best and the published settings three rates and three seeds; five at the best."""
    torch.set_float32_matmul_precision("high")
    pairs = [*itertools.product(RATES, range(3)), (8e-3, 3), (8e-3, 4)]
    study.run_pairs(BOOKS, [({**each, "lr": lr}, n) for each in contenders() for lr, n in pairs])


def stage_larger(study: Study) -> None:
    """Train four times the size."""
    torch.set_float32_matmul_precision("high")
    sections = [
        matrix_rule("mars-m", 0.9, 8e-3, gamma=0.1, clip=1.0),
        matrix_rule("mars-m", 0.9, 8e-3, gamma=0.2, clip=1.0),
        matrix_rule("mars-m", 0.95, 8e-3, gamma=0.025, clip=1.0),  # as published
        matrix_rule("muon", 0.9, 8e-3),
    ]
    study.run(LARGER, at_rates(sections, (2e-3, 4e-3, 8e-3)), range(3))


def stage_batch(study: Study) -> None:
    """Train with four times the batch, as many steps."""
    torch.set_float32_matmul_precision("high")
    study.run(LARGER_BATCH, plane((0.9, 0.95, 0.98), (1, 2), [8e-3]), [0])


STAGES = {
    "plane": stage_plane,
    "quickstart": stage_quickstart,
    "quickstart-adamw": stage_quickstart_adamw,
    "schedules": stage_schedules,
    "seeds": stage_seeds,
    "larger": stage_larger,
    "batch": stage_batch,
}


def main() -> None:
    """Run the stages that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    study = Study(options.texts, options.out, options.smoke)
    for name in options.stages:
        STAGES[name](study)


if __name__ == "__main__":
    main()
