"""Every version from 0.1.0 on reads what 0.1.0 wrote: docs/versions.md promises it."""

import json
import shutil

import pytest

import torchmars
from tests.formats import written_by_0_1_0 as written
from tests.support.commands import finish_run, run_command
from torchmars.core.errors import UserError
from torchmars.data import manifest as data_manifest

# The settings that a run of 0.1.0 needs in its manifest, with those of this run.
CONFIG = {
    "run": {"name": "old", "folder": "runs", "seed": 0},
    "model": {"name": "gpt2", "size": "nano", "n_layer": 2, "n_head": 2, "n_embd": 32},
    "data": {"source": "text:text.txt", "path": "data/old", "validation_fraction": 0.05},
    "training": {
        "steps": 6,
        "global_batch_size": written.BATCH,
        "seq_len": written.LENGTH,
        "dtype": "float32",
        "compile": False,
    },
    "optimizer": {"name": "mars-m", "lr": 0.01, "matrix_dtype": "float32"},
    "validation": {"interval": 0},
    "metrics": {"log_interval": 1},
}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A folder with a run of 0.1.0 and its shards, and its config as the user wrote it."""
    folder = tmp_path_factory.mktemp("old")
    fingerprint = written.write_shards(folder / "data" / "old")
    written.write_run(folder / "runs" / "old", CONFIG, fingerprint)
    (folder / "old.toml").write_text(written.toml(CONFIG))
    return folder


def test_shards_are_read(old):
    found = data_manifest.read_manifest(old / "data" / "old")
    assert found.splits["train"].tokens == 20201 and found.end_of_text == 256


def test_curves_and_events_are_read(old):
    run = torchmars.read_run(old / "runs" / "old")
    assert run.series["train/loss"].values.tolist() == [5.9, 5.8, 5.7, 5.6]
    assert [event.kind for event in run.events] == ["started", "saved", "stopped"]
    assert run.damaged == 0


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "verify", "runs/old"],
        ["generate", "runs/old", "--max-tokens", "4"],
        ["export", "runs/old", "exported"],
        ["runs"],
    ],
)
def test_commands_read_it(old, words):
    code, out, err = run_command(words[0], words[1:], old)
    assert code == 0 and out, err


def test_a_run_goes_on_from_it(old, tmp_path):
    """On two ranks, from step 4 to 6, with the state that was written."""
    shutil.copytree(old, tmp_path / "copy")
    code, out, err = finish_run(tmp_path / "copy" / "old.toml")
    assert code == 0, err
    assert "runs/old/checkpoints/step-00000004" in out and "step 6/6" in out
    lines = (tmp_path / "copy" / "runs/old/metrics.jsonl").read_text().splitlines()
    losses = {
        each["step"]: each["train/loss"] for each in map(json.loads, lines) if "train/loss" in each
    }
    assert [*losses] == [1, 2, 3, 4, 5, 6] and losses[4] == 5.6 and losses[6] < losses[5] < 6.0


def test_a_version_to_come_is_told_from_damage(old, tmp_path):
    shutil.copytree(old / "data" / "old", tmp_path / "newer")
    file = tmp_path / "newer" / "manifest.json"
    entries = json.loads(file.read_text())
    del entries["format"], entries["sha256"]
    file.write_text(written.json_file("torchmars-shards-5", entries))
    with pytest.raises(UserError, match="torchmars-shards-5, which this version cannot read"):
        data_manifest.read_manifest(tmp_path / "newer")
