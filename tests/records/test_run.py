"""A run as its folder tells it."""

import json

import numpy as np
import pytest

from torchmars.core.errors import UserError
from torchmars.records.run import read_run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.toml").write_text(
        "[training]\nsteps = 40\nglobal_batch_size = 4\nseq_len = 8\n"
    )
    return tmp_path


def write_rows(folder, *rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_series_of_rows_with_different_names(folder):
    write_rows(
        folder,
        {"step": 1, "train/loss": 5.0, "train/lr": 1},
        {"step": 1, "validation/loss": 4.5},
        {"step": 2, "train/loss": None, "train/lr": 2},
        {"step": 3, "train/loss": 3.0},
        {"step": 4, "train/loss": 2.0, "train/lr": 4},
        {"step": 5, "train/loss": "x", "train/lr": 5},
        '{"step": 6, "train/lo',
        "[1]",
        '{"train/loss": 7.0}',
        "\x00",
    )
    run = read_run(folder)
    series = run.series
    assert set(series) == {"train/loss", "train/lr", "validation/loss"}
    assert series["train/loss"].steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_equal(series["train/loss"].values, [5, np.nan, 3, 2])
    assert series["train/lr"].steps.tolist() == series["train/lr"].values.tolist() == [1, 2, 4]
    assert run.damaged == 4  # the last line may be one that is being written
    assert series["validation/loss"].values.tolist() == [4.5]


def test_tokens_of_steps(folder):
    steps = np.array([0, 5, 10, 15, 20])
    assert read_run(folder).tokens(steps).tolist() == [0, 160, 320, 480, 640]
    tokens = {10: 1000, 15: None, 20: 4000}
    write_rows(folder, *({"step": step, "train/tokens": count} for step, count in tokens.items()))
    assert read_run(folder).tokens(steps).tolist() == [0, 500, 1000, 2500, 4000]


def test_skipped_steps_are_those_since_the_report_before(folder):
    assert read_run(folder).skipped.steps.tolist() == []
    counts = [0, 2, 2, 1, 4]
    write_rows(folder, *({"step": n, "train/skipped_steps": c} for n, c in enumerate(counts)))
    skipped = read_run(folder).skipped
    assert dict(zip(skipped.steps.tolist(), skipped.values.tolist())) == {1: 2, 4: 3}


@pytest.mark.parametrize(
    "config,message",
    [
        (None, "it has no config.toml"),
        ("[training\n", "is not valid TOML"),
        ("[tool]\na = 1\n", "has no training.steps"),
        ('[training]\nsteps = "many"\n', "has no training.steps"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)
