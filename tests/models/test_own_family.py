"""A third family, a plugin of one file: its own setting, layouts, export and import."""

import shutil
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from tests.support.commands import finish_run, run_command
from tests.support.full import FULL
from tests.support.tiny import metrics, tiny_tables, write_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    """A config of a run of a plugin's family, beside the plugin."""
    shutil.copy(ROOT / "tests" / "support" / "own_family.py", tmp_path)  # not imported here
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path,
        training={"dtype": "float32", "steps": 6},
        optimizer={"name": "mars-m", "matrix_dtype": "float32"},
    )
    del tables["run"]["name"]
    tables["model"] = {"name": "plain", "size": "tiny", "mlp_ratio": 3}
    (tmp_path / "plain.toml").write_text(tomli_w.dumps(tables))
    return tmp_path / "plain.toml"


def train(file, name, *options, ranks):
    """Train on so many ranks; return the losses by step."""
    options = ("--plugins", "own_family", "--run.name", name, *options)
    code, out, err = finish_run(file, *options, ranks=ranks, NGPU=str(ranks))
    assert code == 0 and "2 layers, width 32, MLPs 3 times that" in out, err
    return metrics({"run": {"name": name, "folder": str(file.parent / "runs")}})


@pytest.mark.parametrize("size,remedy", [("nano", "it"), ("tinny", "did you mean tiny? It")])
def test_sizes_of_others_do_not_send_its_author_away(file, size, remedy):
    """`nano` is one of GPT-2 and of Llama."""
    words = [str(file), "--plugins", "own_family", "--model.size", size, "--world-size", "1"]
    code, _, err = run_command("plan", words, file.parent)
    said = f'model.size = "{size}" is no size of model.name = "plain": {remedy} has tiny'
    assert code == 2 and err == f"error: {said}\n"


@FULL
def test_a_family_of_a_plugin_trains_on_layouts_and_comes_back_from_an_export(file):
    alone = train(file, "alone", ranks=1)
    assert alone[6] < alone[1]
    for layout in ("dp_shard", "tp"):
        losses = train(file, layout, f"--parallelism.{layout}", "2", ranks=2)
        assert losses == pytest.approx(alone, rel=1e-5)
    exported = file.parent / "weights"
    words = ["runs/tp", str(exported), "--to", "safetensors", "--plugins", "own_family"]
    code, _, err = run_command("export", words, file.parent)
    assert code == 0, err
    assert load_file(exported / "model.safetensors")["blocks.1.mlp.up.weight"].shape == (96, 32)
    options = ("--checkpoint.init_from", str(exported), "--training.steps", "1")
    again = train(file, "again", *options, "--optimizer.lr", "1e-9", ranks=1)
    words[:2] = ["runs/again", "again"]
    assert run_command("export", words, file.parent)[0] == 0
    folders = exported, file.parent / "again"
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name in first:
        torch.testing.assert_close(second[name], first[name], atol=1e-7, rtol=0)
    assert again[1] < alone[6]
