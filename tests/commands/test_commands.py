"""Real commands with mistakes, and whose output nobody reads to its end."""

import shutil

import pytest
from hypothesis import strategies as st

from tests.support.commands import run_command
from tests.support.full import FULL, full_but
from tests.support.mistakes import KEYS, fuzz, make_checkpoint, make_place, words

# These take long, or the network.
NOT_DRAWN = (
    "guards.hang_seconds",
    "training.compile",
    "metrics",
    "data.tokenizer",
    "validation.sample_tokens",
)
COMMANDS = ("rank", "prepare", "plan", "generate", "export", "checkpoint", "launch")


@st.composite
def command_lines(draw, module):
    """A command, and arguments of which most are wrong."""
    flags = {
        "rank": [],
        "prepare": ["--ranks", "--nodes"],
        "plan": ["--world-size", "--gpus-per-node"],
        "generate": ["--max_tokens", "--temperature", "--top_k", "--seed", "--prompt"],
        "export": [],
        "checkpoint": ["--keep_last", "--keep_every", "--damaged"],
        "launch": ["--nnodes", "--max-restarts", "--rdzv-endpoint"],
    }[module]
    arg = words.filter(lambda word: "\0" not in word and len(word) < 6000)
    verb = draw(st.sampled_from(["verify", "prune", "x"]))
    start = {
        "rank": ["tiny.toml"],
        "prepare": ["tiny.toml"],
        "plan": ["tiny.toml", "--world-size", "2"],
        "generate": ["runs/tiny"],
        "export": ["runs/tiny", "out"],
        "checkpoint": [verb, "runs/tiny"],
        "launch": ["--nproc-per-node", "0"],
    }[module]
    if module in ("rank", "prepare", "plan"):
        flags += [f"--{key}" for key in KEYS if not key.startswith(NOT_DRAWN)]
    args = [*start]
    if draw(st.booleans()) and module != "launch":
        args[-1] = draw(arg)
    for _ in range(draw(st.integers(0, 2))):
        if flags:
            args += [draw(st.sampled_from(flags)), draw(arg)]
    return module, args + (["-m", "torchmars.train", "tiny.toml"] if module == "launch" else [])


@pytest.mark.parametrize(
    "examples", [pytest.param(35, marks=FULL), pytest.param(500, marks=pytest.mark.slow)]
)
def test_commands(tmp_path, examples):
    """Real ones, in processes of their own."""
    make_place(tmp_path)
    made = make_checkpoint(tmp_path)
    kept = shutil.copytree(made, tmp_path / "kept")
    seen = set()

    def check(drawn):
        module, args = drawn
        code, out, err = run_command(module, args, tmp_path)
        lines = err.replace("\r", "\n").splitlines()
        wrong = [line for line in lines if line.startswith("error: ")]
        assert code in (0, 2) and len(wrong) == (code == 2), (code, err)
        assert "Traceback" not in err + out
        seen.add((module, code))
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(kept, made)

    for module in COMMANDS:
        fuzz(examples // len(COMMANDS), command_lines(module), check)
    assert {module for module, code in seen if code == 2} == set(COMMANDS)


@pytest.mark.parametrize(
    "module", full_but(["checkpoint", "train"], [*COMMANDS, "presets", "train"])
)
def test_help_that_nobody_reads_to_its_end(tmp_path, module):
    for args in (["--help"], ["verify", "--help"][: 2 if "checkpoint" in module else 0] or ["-h"]):
        code, out, err = run_command(module, args, tmp_path)
        assert code == 0 and len(out) > 100 and err == ""
        assert run_command(module, args, tmp_path, unread=True) == (0, "", "")


def test_output_that_nobody_reads_to_its_end(tmp_path):
    make_place(tmp_path)
    make_checkpoint(tmp_path)
    for module, args in {
        "generate": ["runs/tiny"],
        "checkpoint": ["verify", "runs/tiny"],
        "plan": ["tiny.toml", "--world-size", "2"],
    }.items():
        assert run_command(module, args, tmp_path, unread=True) == (0, "", "")
