"""Real commands whose output nobody reads to its end."""

import pytest

from tests.support.commands import run_command
from tests.support.full import full_but
from tests.support.mistakes import make_checkpoint, make_place

COMMANDS = ("rank", "prepare", "plan", "generate", "export", "checkpoint", "launch")


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
