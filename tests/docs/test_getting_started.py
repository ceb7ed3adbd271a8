"""The walk of docs/getting_started.md, in fewer steps: its commands print what the page shows."""

import os
import runpy

import pytest

from tests.docs.pages import ROOT, commands, named_files, split_page
from tests.docs.test_samples import first_difference, without_figures
from tests.support.commands import Command
from tests.support.full import FULL
from tests.support.tiny import write_text

pytestmark = FULL
PAGE, _ = split_page(ROOT / "docs" / "getting_started.md")
STEPS = 4


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The folder in which the page's commands were run, and what each printed, by its name."""
    folder = tmp_path_factory.mktemp("walk")
    for name in ("play.txt", "unseen.txt"):
        write_text(folder)
        (folder / "text.txt").rename(folder / name)
    text = named_files("toml")["play.toml"]
    (folder / "play.toml").write_text(text.replace("steps = 400", f"steps = {STEPS}"))
    printed = {}
    for block in PAGE:
        for command in commands(block) if block.language == "bash" else []:
            if command.words[0] == "torchmars":
                printed[command.words[1]] = run(folder, *command.words[1:])
    return folder, printed


def run(folder, name, *args):
    """What a command prints in a folder."""
    env = os.environ | {"NGPU": "2", "OMP_NUM_THREADS": "1", "RDZV_TIMEOUT": "300"}
    process = Command(name, [*args], folder, env, ranks=2)
    out, err = process.communicate()
    assert process.returncode == 0, f"{name}: {err}"
    return out


def shown(start):
    """The lines of the page's block of output with a line that begins so, without numbers."""
    [found] = [
        block.text.splitlines()
        for block in PAGE
        if block.language == "text" and f"\n{start}" in f"\n{block.text}"
    ]
    return without_figures([line.replace("/400", f"/{STEPS}") for line in found])


@pytest.mark.parametrize(
    "start,names",
    [
        ("run       runs/play", ["train"]),
        ("run           step", ["runs", "plot"]),
        ("unseen.txt tokens", ["evaluate"]),
        ("play-hf: 27 tensors", ["export"]),
    ],
)
def test_the_outputs_are_those_of_the_commands(walked, start, names):
    _, printed = walked
    lines = [line for name in names for line in printed[name].splitlines()]
    assert first_difference(shown(start), without_figures(lines)) is None


def test_the_walk_ends_in_transformers(walked, monkeypatch, capsys):
    folder, printed = walked
    assert printed["generate"].startswith("JULIET:")
    assert (folder / "runs/play/plot.html").stat().st_size > 1e4
    (folder / "use.py").write_text(named_files("python")["use.py"])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path("use.py")
    assert "ROMEO:" in capsys.readouterr().out
