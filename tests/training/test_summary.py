"""What a run says at its start."""

import pytest

from torchmars.config.load import load_config
from torchmars.training.checkpointer import Resumed, RunState
from torchmars.training.summary import continuation

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
            300,
            ["--training.stop_after", "300"],
            [
                NO_EFFECT,
                "stopped   at training.stop_after = 300: raise it, or leave it out, to go on",
            ],
        ),
    ],
)
def test_a_run_that_trains_no_more_says_that_a_change_has_no_effect(step, options, expected):
    words = ["--run.name", "x", "--training.steps", "400", *options]
    resumed = Resumed(RunState(step), "from there", changes=[CHANGE])
    assert continuation(load_config(words, "test"), resumed) == expected
