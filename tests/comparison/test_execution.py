"""Whole comparisons on this machine: what comes out, and that nothing that ends them matters."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.comparison.conftest import start_quickly
from tests.support.commands import ranks_of
from tests.support.full import FULL
from torchmars.comparison import local
from torchmars.comparison.results import read_comparison
from torchmars.core.errors import UserError

# It fails at its start: no parameter has such a name.
BROKEN = """[optimizer]
name = "adamw"
groups = [{pattern = "nothing.*"}]
"""
OPTIONS = ["--lr-grid", "1e-3,1e6", "--seeds", "2", "--optimizers", "adamw,mars-adamw,broken.toml"]


class Killed(BaseException):
    """The end of the comparing process, as by SIGKILL: nothing is tidied up."""


# Python runs it first: the run waits after its fifth step until it is told to stop.
WAITS = """
import os, time
from torchmars.training.trainer import Trainer

train_step = Trainer.train_step
def wait(self):
    while "WAITS" in os.environ and self.state.step == 5 and self.signals.received is None:
        time.sleep(0.01)
    return train_step(self)
Trainer.train_step = wait
"""


def start_and_wait(file, variables):
    """Start a trial, and wait until it waits in its middle."""
    (file.parent / "sitecustomize.py").write_text(WAITS)
    path = f"{file.parent}:{os.environ.get('PYTHONPATH', '')}"
    process = start_quickly(file, variables | {"PYTHONPATH": path, "WAITS": "1"})
    metrics, deadline = file.parent / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and '"step": 5,' in metrics.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


def kill_in_the_middle(file, variables):
    """Start a trial, and kill its launcher, its ranks and the comparison after some steps."""
    process = start_and_wait(file, variables)
    for number in [process.pid, *ranks_of(process.pid)]:
        os.kill(number, signal.SIGKILL)
    process.wait()
    raise Killed


def stop_in_the_middle(file, variables):
    """Start a trial, and send this process SIGTERM after some steps."""
    process = start_and_wait(file, variables)
    os.kill(os.getpid(), signal.SIGTERM)
    return process


def outcome(folder):
    """All that a comparison has written but its plots."""
    return [(folder / name).read_text() for name in ("table.md", "table.csv", "results.json")]


@FULL
def test_killed_and_resumed_it_finds_the_same(run, config, tmp_path, monkeypatch):
    (tmp_path / "broken.toml").write_text(BROKEN)
    code, out, err = run(config, *OPTIONS, "--folder", "straight/found", "--jobs", "2")
    assert code == 0, err
    assert "mars-adamw-lr0.001-seed1: validation loss" in out

    def steer(*starts):
        """Let the trials start by these, in turn, and those after them as usual."""
        started, left = [], list(starts)

        def start(file, variables):
            started.append(file.parent.name)
            return (left.pop(0) if left else start_quickly)(file, variables)

        monkeypatch.setattr(local, "start_process", start)
        return started

    parts = [steer(stop_in_the_middle)]
    code, _, err = run(config, *OPTIONS, "--folder", "resumed/found")
    assert code == 75 and "stopped by SIGTERM: waiting for 1 trial to save" in err
    parts.append(steer(start_quickly, start_quickly, kill_in_the_middle))
    with pytest.raises(Killed):
        run(config, *OPTIONS, "--folder", "resumed/found")
    parts.append(steer())
    code, out, err = run(config, *OPTIONS, "--folder", "resumed/found")
    assert code == 0, err

    first, second = "adamw-lr0.001-seed0", "adamw-lr1000000-seed0"
    killed = "mars-adamw-lr0.001-seed0"
    assert parts[0] == [first] and parts[1] == [first, second, killed]
    assert killed in parts[2] and not {first, second} & set(parts[2])  # done stays done
    for name in (first, killed):
        assert (
            "continue  from step"
            in (tmp_path / f"resumed/found/trials/{name}/output.log").read_text()
        )
    assert outcome(tmp_path / "resumed/found") == outcome(tmp_path / "straight/found")
    assert not list(tmp_path.glob("*/found/trials/*/checkpoints/*"))

    assert {"plot.png", "plot.svg"} <= {
        file.name for file in (tmp_path / "resumed/found").iterdir()
    }
    text = (tmp_path / "resumed/found/table.md").read_text()
    assert "| adamw | lr 0.001 |" in text and "| lr lowest |" in text

    found = read_comparison(tmp_path / "resumed/found")
    states = {each.name: each.state for each in found.trials}
    assert states == {
        "adamw-lr0.001-seed0": "done",
        "adamw-lr1000000-seed0": "diverged",
        "adamw-lr0.001-seed1": "done",
        "mars-adamw-lr0.001-seed0": "done",
        "mars-adamw-lr1000000-seed0": "diverged",
        "mars-adamw-lr0.001-seed1": "done",
        "broken-lr0.001-seed0": "failed",
        "broken-lr1000000-seed0": "failed",
    }
    reasons = {each.name: each.reason for each in found.trials}
    assert "nothing.*" in reasons["broken-lr0.001-seed0"]
    assert "lower optimizer.lr" in reasons["adamw-lr1000000-seed0"]
    for each in found.contenders[:2]:
        trials = found.trials_of(each)
        assert [trial.seed for trial in trials] == found.seeds == [0, 1]
        assert each.losses == [trial.loss for trial in trials]
        for trial in trials:
            assert trial.curve.tokens == [6 * 16 * 32, 12 * 16 * 32]
            assert trial.curve.losses[-1] == trial.loss
    assert found.contenders[2].name == "broken" and found.contenders[2].best is None
    assert len(found.differences) == 1

    # Nothing is left to do; another setting is refused; another optimizer and seed are run.
    started = steer()
    code, out, _ = run(config, *OPTIONS, "--folder", "straight/found", "--optimizers", "adamw")
    assert code == 0 and not started and "trials: 2 done, 1 diverged" in out
    other = ["--optimizers", "adamw", "--folder", "straight/found", "--training.seq_len", "16"]
    code, _, err = run(config, *OPTIONS, *other)
    assert code == 2 and not started and "training.seq_len = 16 instead of 32" in err
    with pytest.raises(UserError, match="is not the folder of a comparison"):
        read_comparison(tmp_path)


def make_up(monkeypatch, rows_of):
    """Let trials end as soon as they start, with the metrics that `rows_of` makes of their name."""

    class Ended:
        def __init__(self, file, variables):
            lines = map(json.dumps, rows_of(file.parent.name))
            (file.parent / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
            (file.parent / "config.toml").write_text(file.read_text())

        def poll(self):
            return 0

        wait = poll

    monkeypatch.setattr(local, "start_process", Ended)
    monkeypatch.setattr("torchmars.comparison.execution.POLL_SECONDS", 0)


def test_a_grid_is_widened_until_the_best_lies_within(run, config, monkeypatch):
    """No trial is run: made-up losses are lowest at a learning rate of 8e-3."""

    def rows_of(name):
        lr = float(name.split("-lr")[1].split("-seed")[0])
        return [{"step": 12, "validation/loss": 3 + abs(lr - 8e-3)}]

    make_up(monkeypatch, rows_of)
    options = ["--optimizers", "adamw", "--seeds", "1", "--lr-grid"]
    code, _, err = run(config, *options, "1e-3,2e-3", "--widen", "--folder", "found")
    assert code == 0, err
    found = read_comparison(config.parent / "found")
    assert [each.settings["lr"] for each in found.trials] == [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    assert found.contenders[0].best == {"lr": 8e-3} and not found.contenders[0].edges

    run(config, *options, "1,2", "--widen", "--folder", "bounded")
    found = read_comparison(config.parent / "bounded")
    assert [each.settings["lr"] for each in found.trials] == [0.0625, 0.125, 0.25, 0.5, 1, 2]
    assert found.contenders[0].edges == {"lr": "lowest"}


@FULL
def test_another_baseline_and_grids_of_which_some_have_no_gamma(run, config, monkeypatch):
    """No trial is run: made-up losses of muon are 0.5 higher, and all 0.1 lower at betas of 0.9."""
    started = []

    def rows_of(name):
        started.append(name)
        loss = 3 + 0.5 * name.startswith("muon") - 0.1 * ("betas0.9-" in name)
        loss += 0.01 * int(name[-1]) + 0.2 * ("gamma0.4" in name)
        return [{"step": 6, "validation/loss": 4.5 + loss}, {"step": 12, "validation/loss": loss}]

    make_up(monkeypatch, rows_of)
    grids = ["--lr-grid", "1e-3", "--betas-grid", "0.95:0.99,0.9:0.99", "--gamma-grid", "0.2,0.4"]
    command = [config, *grids, "--optimizers", "muon,mars-m", "--seeds", "2", "--folder", "found"]
    code, out, err = run(*command)
    assert code == 0, err
    assert len(started) == 2 + 4 + 2 and "with 2 seeds (numbers 0 to 1)" in out
    assert "tokens saved" not in out
    for baseline, pair in (("muon", "mars-m - muon"), ("mars-m", "muon - mars-m")):
        code, out, err = run(*command, "--baseline", baseline)
        assert code == 0 and len(started) == 8, err
        assert pair in out and "tokens saved" in out
        found = read_comparison(config.parent / "found")
        assert found.baseline == baseline
        mars, muon = found.contenders
        # Losses fall by 4.5 in the second half, and mars-m is 0.5 lower: it is there sooner.
        saved = {"muon": pytest.approx(0.5 * 0.5 / 4.5), "mars-m": None}[baseline]
        assert (mars.tokens_saved and mars.tokens_saved.mean) == saved and muon.tokens_saved is None
    assert (mars.best, mars.edges) == (
        {"lr": 1e-3, "gamma": 0.2, "betas": [0.9, 0.99]},
        {},
    )
    assert (muon.best, muon.edges) == ({"lr": 1e-3, "betas": [0.9, 0.99]}, {})


def test_a_first_optimizer_that_cannot_start_does_not_end_the_others(run, config, monkeypatch):
    """No trial is run: each fails as soon as it is started."""

    class Failed:
        def __init__(self, file, variables):
            (file.parent / "output.log").write_text("error: it cannot be\n")

        def poll(self):
            return 2

        wait = poll

    (config.parent / "broken.toml").write_text(BROKEN)
    monkeypatch.setattr(local, "start_process", Failed)
    options = ["--optimizers", "broken.toml,adamw", "--seeds", "1", "--lr-grid", "1e-3"]
    code, _, err = run(config, *options, "--folder", "found")
    assert code == 0, err
    found = read_comparison(config.parent / "found")
    assert [each.reason for each in found.trials] == ["exit code 2: it cannot be"] * 2


@pytest.mark.slow
def test_trials_save_and_end_when_their_comparison_is_killed(config, tmp_path):
    """Real processes: none of them is left in the way of the next start."""
    options = ["--lr-grid", "1e-3", "--seeds", "1", "--optimizers", "adamw", "--folder", "found"]
    longer = ["--training.steps", "1000", "--validation.interval", "500"]
    command = [sys.executable, "-m", "torchmars", "compare", str(config), *options, *longer]
    trial, deadline = tmp_path / "found/trials/adamw-lr0.001-seed0", time.monotonic() + 300

    def wait_for(text, file):
        while not (file.exists() and text in file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    process = subprocess.Popen(command)
    wait_for('"step": 50,', trial / "metrics.jsonl")
    process.kill()
    process.wait()
    wait_for("stopped   by SIGTERM after step", trial / "output.log")
    assert subprocess.run(command).returncode == 0
    assert "continue  from step" in (trial / "output.log").read_text()
    assert read_comparison(tmp_path / "found").trials[0].state == "done"
