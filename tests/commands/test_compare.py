"""Mistakes of `torchmars compare`: each is one line, before any trial is started."""

import shutil

import pytest

from tests.comparison.conftest import config, run  # noqa: F401, fixtures
from torchmars import begin
from torchmars.begin import install_command
from torchmars.comparison import local

GRID = ["--lr-grid", "1e-3,2e-3"]


@pytest.fixture
def refused(run, config, monkeypatch, tmp_path):  # noqa: F811
    """Runs `torchmars compare tiny.toml ARGS`, which is a mistake; returns its line."""

    def start(*_):
        raise AssertionError("a trial was started")

    monkeypatch.setattr(local, "start_process", start)

    def refused(*args):
        code, out, err = run(config, *args)
        assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1, err
        assert not (tmp_path / "comparisons").exists()
        return err

    return refused


def test_mistakes_are_one_line(refused, tmp_path):
    (tmp_path / "mine.toml").write_text('[optimizer]\nname = "lion"\n[training]\nsteps = 7\n')
    (tmp_path / "adamw.toml").write_text('[optimizer]\nname = "adamw"\n')
    for args, wrong in [
        ([], "--lr-grid is missing"),
        (["--lr-grid", ""], "--lr-grid needs a word on each side of a comma"),
        (["--lr-grid", "1e-3,fast"], "--lr-grid must be a valid number, got 'fast'"),
        (["--lr-grid", "-1"], "optimizer.lr must be more than 0"),
        ([*GRID, "--betas-grid", "0.9"], "--betas-grid needs 2 values, got"),
        ([*GRID, "--optimizers", "adamw,sgd"], "--optimizers: there is no 'sgd'"),
        ([*GRID, "--optimizers", "mine.toml"], "mine.toml has training beside [optimizer]"),
        ([*GRID, "--optimizers", "lion, my own/a.toml"], "the config my own/a.toml: No such file"),
        ([*GRID, "--optimizers", "adamw,adamw.toml"], "two are called adamw"),
        ([*GRID, "--optimizer.gamma", "0.1"], "--optimizer.gamma has no meaning here"),
        (
            [*GRID, "--optimizers", "muon,mars-m", "--baseline", "adamw"],
            "--baseline: 'adamw' does not take part: name one of muon, mars-m",
        ),
        ([*GRID, "--baseline", ""], "--baseline: '' does not take part: name one of adamw, "),
        ([*GRID, "--seeds", "0"], "--seeds must be greater than or equal to 1"),
        ([*GRID, "--validation.interval", "0"], "validation.interval = 0"),
        (["--lr-grid", "1e-3", "--widen"], "--widen needs two learning rates"),
        ([*GRID, "--training.stps", "2"], "unknown key training.stps"),
    ]:
        assert wrong in refused(*args), args


def test_what_is_not_installed_is_named(refused, monkeypatch):
    find = begin.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(begin, "find_spec", lambda name: None if name == "scipy" else find(name))
        assert f"scipy: {install_command('compare')}" in refused(*GRID)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "--slurm: there is no sbatch here" in refused(*GRID, "--slurm")
