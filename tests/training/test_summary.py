"""What a run says at its start."""

from types import SimpleNamespace

import pytest

from torchmars.config.load import load_config
from torchmars.data.order import Shares
from torchmars.training.checkpointer import Resumed, RunState
from torchmars.training.summary import continuation, data_lines

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


def test_what_a_resumed_run_reads_counts_from_where_it_is():
    """It has made 4 of 8 steps with half of its batch."""
    config = load_config(["--training.steps", "8", "--training.global_batch_size", "32"], "test")
    split = SimpleNamespace(tokens=10**6)
    part = SimpleNamespace(
        folder="here", weight=1, manifest=SimpleNamespace(splits={"train": split}, tokenizer="t")
    )
    data = SimpleNamespace(parts=[part], names=[])
    for state, samples in ((RunState(), 8 * 32), (RunState(4, 64), 64 + 4 * 32)):
        [line] = data_lines(config.training, data, state)
        assert f"8 steps read {samples * config.training.seq_len:,} " in line
    assert not config.optimizer.warning() and Shares().counts(3) == [3]
    far = load_config(["--optimizer.lr", "1000"], "test").optimizer
    assert "166,667 times the default of mars-adamw, 0.006" in far.warning()
