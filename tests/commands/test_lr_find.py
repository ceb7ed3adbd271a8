"""The command that finds learning rates worth trying."""

import json

import pytest

from tests.support.commands import measure_quickly
from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.benchmark import measure


@pytest.fixture
def run(call, scratch, monkeypatch, tmp_path):
    """Runs `torchmars lr-find ARGS`; returns its exit code, output and errors."""
    monkeypatch.setattr(measure, "train", measure_quickly)
    monkeypatch.setenv("NGPU", "1")
    write_text(tmp_path)
    write_config(tiny_config(tmp_path, optimizer={"lr": 0.01}), tmp_path / "tiny.toml")

    def run(*args):
        result = call("lr-find", tmp_path / "tiny.toml", *args)
        assert not list(scratch.glob("torchmars-lr-find-*"))  # whatever happens
        return result

    return run


def test_rates_and_losses_of_a_real_run(run, tmp_path):
    file = tmp_path / "found.json"
    # The config's own run has checkpoints that it could not resume from. They do not matter.
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    code, out, err = run("--steps", "20", "--json", str(file))
    assert code == 0, err
    found = json.loads(file.read_text())
    assert found["lrs"][0] == pytest.approx(1e-4) and found["lrs"][-1] == pytest.approx(1.0)
    assert all(
        b / a == pytest.approx(1e4 ** (1 / 19)) for a, b in zip(found["lrs"], found["lrs"][1:])
    )
    assert found["smoothed"][0] == found["losses"][0] > min(found["losses"])
    assert f"at lr {found['lowest']:.2e}" in out and "--lr-grid " in out
    assert list((tmp_path / "runs").rglob("*.*")) == [checkpoint / "manifest.json"]


@pytest.mark.parametrize(
    "args,message",
    [
        (["--low", "1", "--high", "1"], "--low 1 must be below --high 1"),
        (["--steps", "5"], "--steps must be"),
        (["--json", "none/found.json"], "its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(run, args, message):
    code, out, err = run(*args)
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""
