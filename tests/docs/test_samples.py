"""What the pages show of a command's output is what the command prints.

`...` in a sample stands for anything: alone in a line, for any lines. Figures of a machine and of
its speed are compared by their places alone.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.full import full_but

NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]\d+)?")
PLAN = "plan llama_8b.toml optimizers/mars_m.toml --world-size 64"
# The page, a line of the sample, and the command.
EXACT = [
    ("planning.md", "model     llama 8b", PLAN),
    ("planning.md", "  s/step    GiB", "plan gpt2_small.toml --world-size 8 --find"),
    ("config.md", "gpt2-small-mars-adamw-openwebtext", "presets"),
]
# Of these the last ones show the runs of the first.
OF_A_MACHINE = [
    ("README.md", "run       runs/quickstart", "train quickstart.toml"),
    ("watching.md", "run             ", "runs"),
    ("benchmarks.md", "tokens/s", "bench quickstart.toml"),
]


def sample(page, line):
    """The lines of the block of a page that has a line which begins so."""
    [found] = [
        block.text.splitlines()
        for block in blocks("text")
        if block.page.name == page and re.search(f"^{re.escape(line)}", block.text, re.MULTILINE)
    ]
    return found


def printed(command, folder):
    """The lines that a command prints in a folder."""
    ended = subprocess.run(
        [sys.executable, "-m", "torchmars", *command.split()],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def first_difference(shown, lines):
    """The first line of a sample that does not follow the one before in `lines`; None if all do."""
    anywhere, place = True, 0
    for line in shown:
        if line == "...":
            anywhere = True
            continue
        pattern = ".*".join(map(re.escape, line.split("...")))
        until = len(lines) if anywhere else place + 1
        found = [at for at in range(place, until) if re.fullmatch(pattern, lines[at])]
        if not found:
            return f"{line}\n{lines[place : place + 3]}"
        anywhere, place = False, found[0] + 1
    return None


def without_figures(lines):
    """The same with # for each number, and single spaces."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in lines]


def test_a_difference_is_found():
    lines = ["one 1", "two 2", "three 3"]
    assert first_difference(["one 1", "...", "three ..."], lines) is None
    assert first_difference(["one 1", "three 3"], lines).startswith("three 3\n")
    assert first_difference(["two 3"], lines) and first_difference(["two"], lines)
    assert without_figures(["a  1,000 | 2.5e-04"]) == ["a # | #"]


@pytest.mark.parametrize("page,line,command", full_but(EXACT[2:], EXACT))
def test_samples_are_what_commands_print(tmp_path, page, line, command):
    assert first_difference(sample(page, line), printed(command, tmp_path)) is None


@pytest.mark.slow
def test_samples_of_a_machine_have_the_same_lines(tmp_path):
    for page, line, command in OF_A_MACHINE:
        lines = without_figures(printed(command, tmp_path))
        assert first_difference(without_figures(sample(page, line)), lines) is None, page


def test_samples_exist():
    for page, line, _ in EXACT + OF_A_MACHINE:
        assert sample(page, line) and Path(ROOT / "docs" / page).exists() or page == "README.md"
