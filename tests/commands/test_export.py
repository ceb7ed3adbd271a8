"""Exported weights: the same bytes for the same weights, and nothing else harmed."""

import os
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint import weights
from torchmars.checkpoint.resume import read_verified
from torchmars.checkpoint.weights import write_weights
from torchmars.commands import export


def mode(file):
    return stat.S_IMODE(file.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_weights({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert mode(tmp_path / "weights.safetensors") == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["weights.safetensors"]


def test_the_same_weights_give_the_same_bytes(tmp_path):
    """Also where the tensors come in another order. safetensors orders metadata by chance."""
    weights = {f"weight{number}": torch.full((3,), float(number)) for number in range(8)}
    for number in range(12):
        ordered = dict(sorted(weights.items(), reverse=number % 2 == 1))
        write_weights(ordered, tmp_path / f"{number}.safetensors")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_a_file_that_cannot_be_completed_leaves_the_one_before(tmp_path, monkeypatch):
    file = tmp_path / "weights.safetensors"
    write_weights({"weight": torch.ones(2)}, file)

    def full(weights, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError):
        write_weights({"weight": torch.zeros(2)}, file)
    assert os.listdir(tmp_path) == [file.name]
    assert torch.equal(load_file(file)["weight"], torch.ones(2))


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

    for file in (checkpoint / "weights.safetensors", tmp_path / "link" / "w.safetensors"):
        code, _, err = command(run, file)
        assert code == 2 and "would lie in the checkpoint" in err and err.count("\n") == 1
        assert not file.exists()
    assert read_verified(checkpoint, "full").step == 2
    file = tmp_path / "weights.safetensors"
    file.write_text("mine")
    code, _, err = command(run, file)
    assert code == 2 and "exists: name another file, or replace it with --force" in err
    assert file.read_text() == "mine"
    code, out, _ = command(run, file, "--force")
    assert code == 0 and "36,000 weights" in out and len(load_file(file)) == 15
    again = run / "checkpoints" / "again.safetensors"
    code, _, _ = command(checkpoint, again)
    assert code == 0 and again.read_bytes() == file.read_bytes()
