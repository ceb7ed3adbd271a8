"""Every version from 0.1.0 on reads what those before it wrote: docs/versions.md promises it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import torchmars
from tests.formats import written_by_0_1_0 as written
from tests.formats import written_by_35fc7c1 as written_later
from tests.support.commands import Command, finish_run, run_command
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


PLUGINS = ["--plugins", "ours"]
ONE_RANK = os.environ | {"NGPU": "1", "OMP_NUM_THREADS": "1", "RDZV_TIMEOUT": "300"}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A folder with a run of 0.1.0 and its shards, and its config as the user wrote it."""
    folder = tmp_path_factory.mktemp("old")
    fingerprint = written.write_shards(folder / "data" / "old")
    written.write_run(folder / "runs" / "old", CONFIG, fingerprint)
    (folder / "old.toml").write_text(written.toml(CONFIG))
    return folder


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """A folder with a run of 35fc7c1, its shards, its plugin, and its config as the run keeps it.

    The config has both tables `extra`, and exact_fraction = 1.
    """
    folder = tmp_path_factory.mktemp("later")
    fingerprint = written.write_shards(folder / "data" / "old")
    written_later.write_run(folder / "runs" / "old", fingerprint)
    shutil.copy(Path(__file__).parent / "ours.py", folder)
    shutil.copy(folder / "runs/old/config.toml", folder / "old.toml")
    return folder


@pytest.fixture(params=["old", "later"])
def each(request):
    """Each of the folders above."""
    return request.getfixturevalue(request.param)


def test_shards_are_read(old):
    found = data_manifest.read_manifest(old / "data" / "old")
    assert found.splits["train"].tokens == 20201 and found.end_of_text == 256


def test_curves_and_events_are_read(each):
    run = torchmars.read_run(each / "runs" / "old")
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


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "verify", "runs/old"],
        ["generate", "runs/old", "--max-tokens", "4", *PLUGINS],
        pytest.param(["plan", "old.toml", "--world-size", "2"], marks=pytest.mark.full),
        pytest.param(["runs"], marks=pytest.mark.full),
    ],
)
def test_commands_read_a_run_with_a_plugin(later, words):
    code, out, err = run_command(words[0], words[1:], later)
    assert code == 0 and out, err


def test_weights_of_a_run_with_a_plugin_are_exported(later):
    code, _, err = run_command("export", ["runs/old", "weights.safetensors", *PLUGINS], later)
    assert code == 0, err
    manifest = json.loads((written_later.WRITTEN / "manifest.json").read_text())
    tensors = written_later.tensors(manifest["optimizer"])
    weights = {name: each for name, each in tensors.items() if name.startswith("model.")}
    exported = load_file(later / "weights.safetensors")
    assert exported.keys() == {name.removeprefix("model.") for name in weights}
    assert all(exported[name.removeprefix("model.")].equal(each) for name, each in weights.items())


def test_a_run_goes_on_from_it(old, tmp_path):
    """On two ranks, from step 4 to 6, with the state that was written."""
    losses = losses_of_resumed(old, tmp_path / "copy")
    assert [*losses] == [1, 2, 3, 4, 5, 6] and losses[4] == 5.6 and losses[6] < losses[5] < 6.0


def test_a_run_with_a_plugin_goes_on_in_exact_mode(later, tmp_path):
    """On two ranks, from step 4 to 8, with the losses of the commit that wrote it."""
    losses = losses_of_resumed(later, tmp_path / "copy")
    resumed = {step: loss for step, loss in losses.items() if step > written_later.STEP}
    assert resumed == pytest.approx(written_later.LOSSES, rel=1e-5)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "runs/old", *PLUGINS],
        pytest.param(["train", "old.toml"], marks=pytest.mark.full),
        pytest.param(["plan", "old.toml", "--world-size", "2"], marks=pytest.mark.full),
    ],
)
def test_a_part_of_each_batch_that_corrects_is_refused(later, tmp_path, command):
    """By a checkpoint with another exact_fraction than 1; train has removed it from the config."""
    shutil.copytree(later, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "runs/old/checkpoints/step-00000004/manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["optimizer"]["exact_fraction"] = 0.5
    del manifest["sha256"]
    file.write_text(written.json_file(manifest.pop("format"), manifest))
    config = (tmp_path / "old.toml").read_text()
    line = "exact_fraction = 0.5\n" if command[0] == "plan" else ""
    (tmp_path / "old.toml").write_text(config.replace("exact_fraction = 1.0\n", line))
    start = Command(command[0], command[1:], tmp_path, ONE_RANK, ranks=1)
    out, err = start.communicate()
    assert start.returncode == 2, err
    assert err.count("optimizer.exact_fraction is a setting no more (in ") == 1
    assert "Traceback" not in err


def losses_of_resumed(folder, copy):
    """The losses by step of the run in a copy of a folder, resumed until it ends."""
    shutil.copytree(folder, copy)
    code, out, err = finish_run(copy / "old.toml")
    assert code == 0, err
    assert "runs/old/checkpoints/step-00000004" in out
    lines = (copy / "runs/old/metrics.jsonl").read_text().splitlines()
    found = [each for each in map(json.loads, lines) if "train/loss" in each]
    return {each["step"]: each["train/loss"] for each in found}


def test_a_version_to_come_is_told_from_damage(old, tmp_path):
    shutil.copytree(old / "data" / "old", tmp_path / "newer")
    file = tmp_path / "newer" / "manifest.json"
    entries = json.loads(file.read_text())
    del entries["format"], entries["sha256"]
    file.write_text(written.json_file("torchmars-shards-5", entries))
    with pytest.raises(UserError, match="torchmars-shards-5, which this version cannot read"):
        data_manifest.read_manifest(tmp_path / "newer")
