"""The benchmark of a config by its own run."""

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
def test_a_config_by_its_own_run(run, config, tmp_path):
    code, out, err = run(config, "--steps", 2, "--model.n_embd", 16)
    assert code == 0, err
    assert f"config    {config} --model.n_embd 16\n          2 ranks\n" in out
    assert "steps     2, after 2 that do not count" in out
    lines = out.partition("count\n\n")[2].splitlines()
    names = [line.strip().split("  ")[0] for line in lines]
    assert names[:3] == ["tokens/s", "mfu", "step, ms"]
    assert names[-2:] == ["other", "peak memory of rank 0, GiB"]
    assert {"data", "forward", "backward", "optimizer"} < set(names)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "shards").exists()


def test_a_step_and_its_phases():
    times = {"train/optimizer_ms": 500.0, "train/other_ms": 100.0, "train/forward_ms": 1400.0}
    rate = {"train/tokens_per_second": 256.0, "train/memory_gib": 1.5, "train/loss": 5.0}
    assert [" ".join(line.split()) for line in bench.bench_table(rate | times, 512)] == [
        "tokens/s 256",
        "mfu -",
        "step, ms 2,000.0",
        "optimizer 500.0 ( 25%)",
        "forward 1,400.0 ( 70%)",
        "other 100.0 ( 5%)",
        "peak memory of rank 0, GiB 1.50",
    ]


@pytest.mark.parametrize(
    "args,wrong",
    [
        (["--steps", "0"], "--steps must be greater than or equal to 1, got 0"),
        (["--optimizer.name", "adamm"], "optimizer.name"),
        (["--training.global_batch_size", "15"], "training.global_batch_size = 15 does not divide"),
    ],
)
def test_mistakes_are_one_line(run, config, args, wrong):
    """The last one is found by the ranks."""
    code, out, err = run(config, "--steps", "1", *args)
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
