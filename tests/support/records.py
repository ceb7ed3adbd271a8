"""Folders of runs and results of comparisons as the commands leave them, made without training."""

import json
import math
from pathlib import Path

import numpy as np

from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    LossCurve,
    TrialResult,
)
from torchmars.records.events import EventLog
from torchmars.records.run import read_run

TOKENS_PER_STEP = 4096
PHASES = ("data", "forward", "backward", "optimizer", "other")


def made_run(folder: Path, steps: int, seed: int = 0, **settings: float) -> Path:
    """Write a run of so many steps, a row each, without events; return its folder."""
    folder.mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (folder / "config.toml").write_text(
        f'[run]\nname = "{folder.name}"\n[training]\nsteps = {steps}\nglobal_batch_size = 16\n'
        "seq_len = 256\n[optimizer]\n" + "\n".join(lines) + "\n"
    )
    noise = np.random.default_rng(seed).standard_normal((steps, 4))
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(1, steps + 1):
            stream.write(json.dumps(made_row(step, steps, noise[step - 1], seed)) + "\n")
            if step % max(steps // 20, 1) == 0:
                loss = 3 + 5 * (1 + step / 50) ** -0.4 + 0.01 * seed
                stream.write(json.dumps({"step": step, "validation/loss": loss}) + "\n")
    return folder


def made_row(step: int, steps: int, noise: np.ndarray, seed: int) -> dict[str, float]:
    """Return a row of training as a run of several roles reports it."""
    loss = 2.9 + 5 * (1 + step / 50) ** -0.4 + 0.01 * seed + 0.05 * noise[0]
    row = {"step": step, "train/loss": loss, "train/lr": 1e-3 * math.cos(1.5 * step / steps)}
    row |= {"train/tokens": TOKENS_PER_STEP * step, "train/memory_gib": 2.5}
    row |= {"train/tokens_per_second": 20_000 + 800 * noise[1], "train/skipped_steps": 0.0}
    row["train/grad_norm"] = (0.4 + 3 / math.sqrt(step)) * math.exp(0.3 * noise[2])
    for role in ("embedding", "matrix", "vector"):
        row[f"train/{role}/grad_norm"] = row["train/grad_norm"] / 2
        row[f"train/{role}/correction"] = 1
    row |= {"train/matrix/clipped": 0.1, "train/matrix/cosine": 0.2 + 0.1 * noise[3]}
    return row | {f"train/{phase}_ms": 20 + 5 * abs(noise[1]) for phase in PHASES}


def made_comparison() -> Comparison:
    """Return a comparison of three optimizers, of which one differs by more than the spread."""
    contenders = {"mars-adamw": (3.30, 0.003), "adamw": (3.42, 0.003), "muon": (3.41, 0.01)}
    trials = []
    for name, (floor, best) in contenders.items():
        for lr in (0.001, 0.003, 0.01, 0.03):
            for seed in range(3 if lr == best else 1):
                trials.append(made_trial(name, floor, best, lr, seed))
    losses = {
        name: [
            each.loss
            for each in trials
            if each.contender == name and each.settings["lr"] == best and each.loss is not None
        ]
        for name, (_, best) in contenders.items()
    }
    means = {name: float(np.mean(values)) for name, values in losses.items()}
    savings = {
        "mars-adamw": Estimate(0.23, 0.15, 0.31),
        "adamw": None,
        "muon": Estimate(0.02, -0.06, 0.10),
    }
    results = [
        ContenderResult(
            name,
            name,
            {"lr": best},
            {"lr": "highest"} if name == "muon" else {},
            losses[name],
            means[name],
            float(np.std(losses[name], ddof=1)),
            savings[name],
            "the baseline" if name == "adamw" else "",
        )
        for name, (_, best) in sorted(contenders.items(), key=lambda item: means[item[0]])
    ]
    pairs = [(a, b) for n, a in enumerate(results) for b in results[n + 1 :]]
    differences = []
    for a, b in pairs:
        difference = means[a.name] - means[b.name]
        low, high = difference - 0.03, difference + 0.03
        loss = Estimate(difference, low, high)
        differences.append(Difference(a.name, b.name, loss, low > 0 or high < 0))
    return Comparison(
        "optimizers",
        ["books.toml"],
        {"lr": [0.001, 0.003, 0.01, 0.03]},
        [0, 1, 2],
        1200,
        1200 * TOKENS_PER_STEP,
        "adamw",
        results,
        differences,
        trials,
        "optimizer",
    )


def made_trial(name: str, floor: float, best: float, lr: float, seed: int) -> TrialResult:
    """Return a trial whose loss is the higher the farther its lr is from the `best`."""
    loss = floor + 0.12 * math.log10(lr / best) ** 2 + 0.01 * (seed - 1) * (1 + len(name) % 3)
    diverged = lr / best > 5
    steps = np.arange(100, 1300, 100)
    curve = loss + 3 * ((1 + steps / 100.0) ** -1.0 - 13.0**-1.0)
    return TrialResult(
        f"{name}-lr{lr:g}-seed{seed}",
        name,
        {"lr": lr},
        seed,
        "diverged" if diverged else "done",
        "the loss is not finite: lower optimizer.lr" if diverged else "",
        None if diverged else float(loss),
        LossCurve([], [])
        if diverged
        else LossCurve((steps * float(TOKENS_PER_STEP)).tolist(), curve.tolist()),
        f"trials/{name}-lr{lr:g}-seed{seed}",
    )


def restarted_run(folder, steps=100, **more):
    """A run that was started again after step 40."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        "[training]\nsteps = 100\nglobal_batch_size = 4\nseq_len = 128\n"
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "train/loss": 5 / step, "train/tokens": 512 * step}
            row |= {"train/grad_norm": None if step == 30 else 1.0, "train/skipped_steps": 0}
            row |= {"train/data_ms": 1.0, "train/forward_ms": 2.0, "train/tokens_per_second": 9.0}
            file.write(json.dumps(row | more) + "\n")
        file.write(json.dumps({"step": steps, "validation/loss": 2.5}) + "\n")
    log = EventLog(folder)
    for kind, step in (("started", 0), ("saved", 40), ("started", 40)):
        log.add(kind, step)
    return read_run(folder)


def listed_run(folder, events=(), steps=40, reported=(10,), saved=()):
    """Write a run as far as lists of runs read it; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f"[training]\nsteps = {steps}\n")
    rows = (json.dumps({"step": step, "train/loss": 1.0 * step}) for step in reported)
    (folder / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    for step in saved:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    for kind in events:
        EventLog(folder).add(kind, 10)
    return folder
