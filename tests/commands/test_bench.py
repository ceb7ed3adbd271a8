"""The benchmark of configs by their own runs."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from tests.support.commands import measure_quickly
from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.benchmark import measure
from torchmars.commands import bench

REAL_TRAIN = measure.train


@pytest.fixture
def run(call, scratch, monkeypatch, tmp_path):
    """Runs `torchmars bench ARGS`; returns its exit code, output and errors."""
    monkeypatch.setattr(measure, "train", measure_quickly)
    monkeypatch.chdir(tmp_path)

    def run(*args):
        result = call("bench", *args)
        assert not list(scratch.glob("torchmars-bench-*"))  # whatever happens
        return result

    return run


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "tiny.toml"
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), file)
    return file


@pytest.mark.full
def test_two_configs_in_alternation(run, config, tmp_path):
    file = tmp_path / "results.json"
    other = f"{config} --training.seq_len 16 --parallelism.pp 2 --training.microbatch_size 8"
    options = ["--steps", 4, "--warmup", 2, "--rounds", 2, "--json", file, "--against", other]
    code, out, err = run(config, *options, "--model.n_embd", 16)
    assert code == 0, err
    found = json.loads(file.read_text())
    one, two = found["configs"]
    assert one["arguments"] == f"{config} --model.n_embd 16" and two["arguments"] == other
    assert one["ranks"] == two["ranks"] == 2 and one["data"].startswith("random tokens, since ")
    assert len(one["rounds"]) == len(two["rounds"]) == 2
    for each in (*one["rounds"], *two["rounds"]):
        assert min(each["phases_ms"].values()) > 0 and each["step_ms"] > 0
        assert each["memory_gib"] > 0 and each["mfu"] is None
    assert {"forward", "backward"} < set(one["rounds"][0]["phases_ms"])
    assert "pipeline" in two["rounds"][0]["phases_ms"]
    rates = [[each["tokens_per_second"] for each in of["rounds"]] for of in (one, two)]
    ratios = sorted(a / b for a, b in zip(*rates))
    assert [found["ratio"]["lowest"], found["ratio"]["highest"]] == pytest.approx(ratios)
    assert f"A / B, tokens/s, round by round: {sum(ratios) / 2:.3f} (" in out
    said = [line.partition(":")[0] for line in out.splitlines() if line.startswith("round")]
    assert said == [
        f"round {which}" for which in ("1 of 2, A", "1 of 2, B", "2 of 2, B", "2 of 2, A")
    ]
    assert not (tmp_path / "runs").exists() and not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    "args,wrong",
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--optimizer.name", "adamm"], "optimizer.name"),
        (["--against", "'tiny.toml"], '--against: cannot read "\'tiny.toml": No closing quotation'),
        (
            ["--against", " "],
            "--against names no config: it has files and options of the other one",
        ),
        (["--against", "--optimizer.lr 1"], "--against names no config: it has files and options"),
        (["--json", "nowhere/results.json"], "--json: cannot write nowhere/results.json"),
        (["--training.global_batch_size", "15"], "training.global_batch_size = 15 does not divide"),
    ],
)
def test_mistakes_are_one_line(run, config, args, wrong):
    """The last one is found by the ranks."""
    code, out, err = run(config, "--steps", "1", "--warmup", "1", *args)
    assert code == 2 and wrong in err
    assert err.count("\n") == 1 and "Traceback" not in out + err


def test_a_run_that_crashes_shows_its_end(run, config, monkeypatch):
    def crash(file, ranks, output):
        os.write(output, b"one\nTraceback ...\nIndexError: two\n")
        return 1

    monkeypatch.setattr(measure, "train", crash)
    code, _, err = run(config)
    assert code == 1 and err.endswith("IndexError: two\n")


STOPPED = f"""#!{sys.executable}
import signal, sys
def stop(*_):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open("ready", "w").close()
signal.pause()
"""


def test_a_signal_stops_the_run_that_is_measured(run, config, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(STOPPED)
    program.chmod(0o755)
    ready = tmp_path / "ready"

    def stop():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(measure, "train", REAL_TRAIN)
    monkeypatch.setattr(sys, "executable", str(program))
    handler = signal.getsignal(signal.SIGTERM)
    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    code, _, err = run(config)
    assert code == 75 and err == "error: stopped by a signal before all was measured\n"
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.slow
def test_from_the_shell(run, config, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["bench", str(config), "--steps", "2", "--warmup", "1"])
    bench.main()
