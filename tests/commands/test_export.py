"""Exported weights: the same bytes for the same weights, and nothing else harmed."""

import importlib
import os
import shlex
import shutil
import signal
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import Command, run_command
from tests.support.mistakes import make_checkpoint, make_place
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.commands import export
from torchmars.config.load import load_config
from torchmars.core.errors import UserError
from torchmars.exchange.export import export as export_models
from torchmars.exchange.saved_model import SavedModel, open_model
from torchmars.exchange.weights import write_weights
from torchmars.training.preparation import prepare_run


def write(weights, folder):
    folder.mkdir()
    write_weights(folder, weights.items())
    return folder / "model.safetensors"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        file = write({"weight": torch.ones(2)}, tmp_path / "weights")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert os.listdir(file.parent) == [file.name]


def test_export_never_harms_a_checkpoint_nor_replaces_a_file_unasked(tmp_path, capsys, monkeypatch):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 2})
    train(1, tables)
    run = run_folder_of(tables)
    checkpoint = run / "checkpoints" / "step-00000002"
    (tmp_path / "link").symlink_to(checkpoint)

    def command(*args):
        monkeypatch.setattr(sys, "argv", ["export", *map(str, args)])
        try:
            export.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    for folder in (checkpoint / "hf", tmp_path / "link" / "weights"):
        code, _, err = command(run, folder)
        assert code == 2 and "would damage the checkpoint that it is in: name a new" in err
        assert not folder.exists()
    code, out, _ = command(run, tmp_path / "weights", "--to", "safetensors")
    assert code == 0 and "36,000 weights" in out and f"of {checkpoint}, step 2\n" in out
    file = tmp_path / "weights" / "model.safetensors"
    assert len(load_file(file)) == 15
    again = run / "checkpoints" / "again"
    code, _, _ = command(checkpoint, again, "--to", "safetensors")
    assert code == 0 and (again / file.name).read_bytes() == file.read_bytes()
    (tmp_path / "mine").mkdir()
    code, _, err = command(run, tmp_path / "mine")
    assert code == 2 and "mine: it exists: name a new folder" in err
    assert not list((tmp_path / "mine").iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of weights alone."""
    folder = tmp_path_factory.mktemp("place")
    make_place(folder)
    return make_checkpoint(folder)


def test_what_no_class_can_hold_is_refused_before_anything_is_written(tmp_path):
    write_text(tmp_path)
    shape = {"name": "llama", "n_head": 2, "n_kv_head": 1, "qk_norm": True, "qkv_bias": True}
    tables = tiny_tables(tmp_path, model=shape, training={"steps": 1})
    train(1, tables)
    run = str(run_folder_of(tables))
    code, _, err = run_command("export", [run, "hf"], tmp_path)
    assert code == 2 and "has model.qk_norm and model.qkv_bias" in err and err.count("\n") == 1
    assert not list(tmp_path.glob("hf*"))
    code, _, err = run_command("export", [run, "bare", "--to", "safetensors"], tmp_path)
    assert code == 0, err


def test_an_error_in_the_middle_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    model, reads = open_model(checkpoint), []

    def read(self, name):
        reads.append(name)
        if len(reads) == 7:
            raise OSError(28, "No space left on device")
        return torch.zeros(self.model.get_parameter(name).shape)

    monkeypatch.setattr(SavedModel, "read", read)
    with pytest.raises(UserError, match="No space left on device"):
        export_models(model, tmp_path / "hf")
    assert len(reads) == 7 and not list(tmp_path.iterdir())


def test_what_lies_where_an_export_is_made_is_not_deleted(checkpoint, tmp_path):
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "README.md").write_text("mine")
    with pytest.raises(UserError, match="hf.partial: File exists: remove it if an export"):
        export_models(open_model(checkpoint), tmp_path / "hf")
    assert [path.name for path in tmp_path.rglob("*")] == ["hf.partial", "README.md"]


def following(out):
    """The commands that an output names as next ones, as a shell takes them."""
    lines = out.partition("\nnext ")[2].splitlines()
    assert lines and all(line.split()[0] == "torchmars" for line in lines)
    return [shlex.split(line)[1:] for line in lines if line]


def test_the_next_commands_can_be_pasted(checkpoint, tmp_path, monkeypatch, capsys):
    """Also where a path has a blank."""
    place = checkpoint.parents[3]
    monkeypatch.chdir(place)
    target = tmp_path / "an export"
    code, out, err = run_command("export", [str(checkpoint), str(target)], place)
    ((generate, *sample),) = following(out)
    assert (code, generate) == (0, "generate"), err
    code, out, err = run_command(generate, [*sample, "--max-tokens", "5"], place)
    assert code == 0 and out.startswith("The"), err

    monkeypatch.setattr(sys, "argv", ["import", str(target), str(tmp_path / "a config.toml")])
    importlib.import_module("torchmars.commands.import").main()
    (generate, *sample), (train, *args) = following(capsys.readouterr().out)
    assert (generate, train) == ("generate", "train")
    code, _, err = run_command(generate, [*sample, "--max-tokens", "5"], place)
    assert code == 0, err
    data = ["--data.source", f"text:{place}/text.txt", "--data.path", str(tmp_path / "shards")]
    prepare_run(load_config([*args, *data], "test"), 1, 1)


KILLER = """
import os
from tests.support.damage import die_at
die_at(int(os.environ["KILL_AT"]))
"""


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_durable_call_leaves_no_half_export(checkpoint, tmp_path, stride):
    """Each export is killed some calls later than the one before it."""
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    target, kills = tmp_path / "hf", 0
    while True:
        env = os.environ | {"PYTHONPATH": str(tmp_path), "KILL_AT": str(1 + stride * kills)}
        command = Command("export", [str(checkpoint), str(target)], tmp_path, env)
        _, err = command.communicate()
        if command.returncode == 0 or target.exists():
            break
        assert command.returncode == -signal.SIGKILL, err
        shutil.rmtree(tmp_path / "hf.partial", ignore_errors=True)
        kills += 1
    assert kills >= 20 // stride
    assert {file.name for file in target.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "torchmars.toml",
    }
    assert len(load_file(target / "model.safetensors")) == 28
    assert not list(tmp_path.glob("*.partial"))
