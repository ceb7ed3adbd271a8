"""The report command."""

import functools
import json
import sys

import pytest

from tests.support.records import made_comparison, made_run
from torchmars.commands import report
from torchmars.comparison.results import write_comparison

pytest.importorskip("plotly")


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """Runs `torchmars report ARGS`; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    return functools.partial(call, "report")


def test_where_the_page_is_written(run, tmp_path):
    made_run(tmp_path / "a", 3)
    made_run(tmp_path / "b", 3)
    (tmp_path / "c").mkdir()
    write_comparison(made_comparison(), tmp_path / "c")
    assert run("a") == (0, "report    a/report.html\n", "")
    assert run("a", "b") == (0, "report    report.html\n", "")
    (tmp_path / "a-hf").mkdir()  # as of an export
    code, out, _ = run("a", "a-hf", "report.html", "b", "--out", "two.html")
    assert code == 0 and out == (
        "left out a-hf: it has no config.toml, so it is not the folder of a run\n"
        "left out report.html: it has no config.toml, so it is not the folder of a run\n"
        "report    two.html\n"
    )
    assert "<title>2 runs</title>" in (tmp_path / "two.html").read_text()
    code, _, err = run("a", "a-hf", "nowhere")
    assert code == 2 and "nowhere is not the folder of a run: it does not exist" in err
    assert run("c", "--out", "page.html") == (0, "report    page.html\n", "")
    assert "<title>a</title>" in (tmp_path / "a" / "report.html").read_text()
    assert "<title>2 runs</title>" in (tmp_path / "report.html").read_text()
    assert "<title>optimizers</title>" in (tmp_path / "page.html").read_text()
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "report.html",
    ]


@pytest.mark.parametrize(
    "args, message",
    [
        (["nowhere"], "nowhere is not the folder of a run: it does not exist"),
        ([], "RUNS is missing"),
        (["c", "a"], "c is a comparison: name it alone"),
        (["a", "--out", "."], "--out: . must end in .html or .htm"),
        (["a", "--out", "x.html"], "--out: cannot write x.html: Is a directory"),
        (["a", "--out", "x.gif"], "--out: x.gif must end in .html or .htm"),
        (["c", "--out", "page"], "--out: page must end in .html or .htm"),
        (["a", "--out", "no/page.html"], "cannot write no/page.html: No such file or directory"),
        (["a", "--ot", "x"], "unknown option --ot: did you mean --out?"),
    ],
)
def test_mistakes(run, tmp_path, args, message):
    made_run(tmp_path / "a", 3)
    (tmp_path / "c").mkdir()
    (tmp_path / "x.html").mkdir()
    write_comparison(made_comparison(), tmp_path / "c")
    code, out, err = run(*args)
    assert code == 2 and not out and message in err and err.count("\n") == 1


def test_without_plotly(run, tmp_path, monkeypatch):
    from torchmars.reports import page

    page.plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    made_run(tmp_path / "a", 3)
    code, _, err = run("a")
    assert code == 2
    assert "a report needs the package plotly: pip install 'torchmars[report]'" in err
    assert not (tmp_path / "a" / "report.html").exists()


def test_follow_ends_with_the_run(run, tmp_path, monkeypatch):
    folder, pages = made_run(tmp_path / "a", 5), []

    def tell(kind):
        row = {"time": 1.8e9, "event": kind, "step": 5}
        with (folder / "events.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def sleep(seconds):
        pages.append((folder / "report.html").read_text())
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": 7, "train/loss": 1.0}) + "\n")
        if len(pages) == 2:
            tell("complete")

    monkeypatch.setattr(report.time, "sleep", sleep)
    tell("started")
    (folder / "lock").write_text("process 1 on another machine, since then")
    code, out, err = run("a", "--follow")
    last = (folder / "report.html").read_text()
    assert (code, err, len(pages)) == (0, "", 2) and out.endswith("report    a/report.html\n")
    assert all("renewed every 20 s" in page for page in pages) and "renewed every" not in last
    assert "5 of 5" in pages[0] and "7 of 5" in pages[1]
