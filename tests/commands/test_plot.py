"""torchmars plot."""

import functools

import pytest

from tests.support.full import full_but
from tests.support.records import restarted_run


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """Runs `torchmars plot ARGS` where there are two runs; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b"):
        restarted_run(tmp_path / name, 3)
    (tmp_path / "v1.2").mkdir()

    return functools.partial(call, "plot")


PLACES = [
    (["runs/a"], ["runs/a/plot.png", "runs/a/plot.svg"]),
    (["runs/a", "runs/b", "--x", "seconds"], ["plot.png", "plot.svg"]),
    (["runs/a", "--out", "figures"], ["figures/plot.png", "figures/plot.svg"]),
    (["--out=new/both.svg", "runs/a", "runs/b"], ["new/both.svg"]),
    (["runs/a", "--out=v1.2"], ["v1.2/plot.png", "v1.2/plot.svg"]),
]


@pytest.mark.parametrize("args,files", full_but(PLACES[1:2], PLACES))
def test_where_pictures_go(run, tmp_path, args, files):
    code, out, err = run(*args)
    assert (code, err) == (0, "") and out == "".join(f"wrote {file}\n" for file in files)
    assert sorted(map(str, tmp_path.rglob("*.[ps][nv]g"))) == [str(tmp_path / f) for f in files]


@pytest.mark.parametrize(
    "args,error",
    [
        ([], "RUNS is missing"),
        (["runs/a", "runs/c"], "runs/c is not the folder of a run: it does not exist: name one"),
        (["runs"], "runs is not the folder of a run: it has no config.toml"),
        (["v1.2", "runs"], "v1.2 is not the folder of a run: it has no config.toml"),
        (["runs/a", "--x", "hours"], '--x must be one of "tokens", "step", "seconds", got'),
        (
            ["runs/a", "--out", "runs/a/config.toml"],
            "--out: runs/a/config.toml must end in .png or",
        ),
        (
            ["runs/a", "--out", "x.gif"],
            "--out: x.gif must end in .png or .svg, or be a folder that",
        ),
        (
            ["runs/a", "--out", "new/both.pdf"],
            "--out: new/both.pdf must end in .png or .svg, or be",
        ),
        (["runs/a", "--out", "runs/a/config.toml/x.png"], "--out: cannot write runs/a/config"),
    ],
)
def test_mistakes(run, tmp_path, args, error):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*args)
    assert sorted(tmp_path.rglob("*")) == before
    assert (code, out) == (2, "") and err.startswith(f"error: {error}") and err.count("\n") == 1


def test_without_matplotlib(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("runs/a")
    assert code == 2 and err == (
        "error: torchmars plot needs the package matplotlib: pip install 'torchmars[plot]'\n"
    )
