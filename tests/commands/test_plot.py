"""torchmars plot."""

import functools
import sys

import pytest

from tests.support.full import full_but
from tests.support.records import made_comparison, made_run, restarted_run
from torchmars import reports
from torchmars.begin import install_command
from torchmars.comparison.results import write_comparison


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """Runs `torchmars plot ARGS` where there are two runs; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b"):
        restarted_run(tmp_path / name, 3)
    made_run(tmp_path / "runs/begun", 1)
    for name in ("v1.2", "compared"):
        (tmp_path / name).mkdir()
    write_comparison(made_comparison(), tmp_path / "compared")

    return functools.partial(call, "plot")


PLACES = [
    (["runs/a"], ["runs/a/plot.png", "runs/a/plot.svg"]),
    (["runs/a", "runs/b", "--all"], ["plot.png", "plot.svg"]),
    (["runs/a", "--html"], ["runs/a/plot.html"]),
    (["runs/a", "runs/b", "--html", "--out=new/both"], ["new/both/plot.html"]),
    (["compared"], ["compared/plot.png", "compared/plot.svg"]),
    (["compared", "--html", "--out", "v1.2"], ["v1.2/plot.html"]),
    (["runs/a", "--out", "figures"], ["figures/plot.png", "figures/plot.svg"]),
    (["--out=new/both", "runs/a", "runs/b"], ["new/both/plot.png", "new/both/plot.svg"]),
    (["runs/a", "--out=v1.2"], ["v1.2/plot.png", "v1.2/plot.svg"]),
]


@pytest.mark.parametrize("args,files", full_but(PLACES[1:4:2], PLACES))
def test_where_pictures_go(run, tmp_path, args, files):
    code, out, err = run(*args)
    assert (code, err) == (0, "") and out == "".join(f"wrote {file}\n" for file in files)
    found = (each for each in tmp_path.rglob("*") if each.suffix in (".png", ".svg", ".html"))
    assert sorted(map(str, found)) == [str(tmp_path / file) for file in files]


@pytest.mark.parametrize(
    "args,error",
    [
        ([], "the following arguments are required: RUNS"),
        (["runs/a", "runs/c"], "runs/c is not the folder of a run: it does not exist: name one"),
        (["runs"], "runs is not the folder of a run: it has no config.toml"),
        (["v1.2", "runs"], "v1.2 is not the folder of a run: it has no config.toml"),
        (["runs/a", "compared"], "compared is a comparison: name it alone, or runs in its place"),
        (["runs/begun"], "runs/begun has nothing to draw yet: wait for its second report"),
        (["runs/a", "--out", "runs/a/config.toml"], "--out: cannot write runs/a/config"),
    ],
)
def test_mistakes(run, tmp_path, args, error):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*args)
    assert sorted(tmp_path.rglob("*")) == before
    assert (code, out) == (2, "") and err.startswith(f"error: {error}") and err.count("\n") == 1


def test_without_matplotlib(run, monkeypatch):
    monkeypatch.delattr(reports, "figures", raising=False)
    monkeypatch.setitem(sys.modules, "torchmars.reports.figures", None)
    code, _, err = run("runs/a")
    assert code == 2 and err == (
        f"error: torchmars plot needs the package matplotlib: {install_command('plot')}\n"
    )
