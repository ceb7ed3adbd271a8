"""What a run says at its start."""

import tomllib
from pathlib import Path

import pytest
import torch

from torchmars.config.load import load_config
from torchmars.training.checkpointer import Resumed, RunState
from torchmars.training.summary import TESTED, continuation, torch_warning


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", torch.__version__])
def test_a_torch_that_was_tested_needs_no_word(version):
    assert torch_warning(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git1", "2.9"])
def test_a_torch_that_was_not_tested_is_named_in_a_line(version):
    said = f"torch {version}: torchmars was tested with torch 2.11 to 2.15"
    assert torch_warning(version) == said


def test_a_new_environment_gets_a_torch_that_was_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [torch_range] = [each for each in project["dependencies"] if each.startswith("torch>")]
    major, minor = TESTED[1].split(".")
    assert torch_range == f"torch>={TESTED[0]},<{major}.{int(minor) + 1}"


CHANGE = "optimizer.lr 0.01 -> 0.005"
NO_EFFECT = f"changed   {CHANGE}: has no effect, for nothing is trained"


@pytest.mark.parametrize(
    "step,options,expected",
    [
        (300, [], [f"changed   {CHANGE}", "continue  from there"]),
        (
            400,
            [],
            [
                NO_EFFECT,
                "complete  all 400 steps are done: runs/x/checkpoints/step-00000400. "
                "To go on: --training.steps 800",
            ],
        ),
        (
            403,
            [],
            [
                NO_EFFECT,
                "complete  403 steps are done, of 400: runs/x/checkpoints/step-00000403. "
                "To go on: --training.steps 803",
            ],
        ),
        (
            300,
            ["--training.stop_after", "300"],
            [
                NO_EFFECT,
                "stopped   at training.stop_after = 300: raise it, or leave it out, to go on",
            ],
        ),
        (
            300,
            ["--training.stop_after", "200"],
            [
                NO_EFFECT,
                "stopped   at step 300, past training.stop_after = 200: raise it, or leave it "
                "out, to go on",
            ],
        ),
    ],
)
def test_a_run_that_trains_no_more_says_that_a_change_has_no_effect(step, options, expected):
    words = ["--run.name", "x", "--training.steps", "400", *options]
    resumed = Resumed(RunState(step), "from there", changes=[CHANGE])
    assert continuation(load_config(words, "test"), resumed) == expected
