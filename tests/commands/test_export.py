"""Exported weights: the same bytes for the same weights, and nothing else harmed."""

import os
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint.resume import read_verified
from torchmars.checkpoint.weights import write_weights
from torchmars.commands import export


def write(weights, file):
    entries = {name: (value.dtype, value.shape) for name, value in weights.items()}
    write_weights(file, entries, weights.values())


def mode(file):
    return stat.S_IMODE(file.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        write({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert mode(tmp_path / "weights.safetensors") == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["weights.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_has_what_the_library_reads(tmp_path, dtype):
    weights = {f"w{n}": torch.randn(n, 2 * n + 1).to(dtype) for n in (1, 0, 3)}
    write(weights, tmp_path / "weights.safetensors")
    read = load_file(tmp_path / "weights.safetensors")
    assert read.keys() == weights.keys()
    for name, value in weights.items():
        assert read[name].dtype == dtype and torch.equal(read[name], value)


def test_a_file_that_cannot_be_completed_leaves_the_one_before(tmp_path):
    file = tmp_path / "weights.safetensors"
    write({"weight": torch.ones(2)}, file)

    def half(*_):
        yield torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_weights(file, dict.fromkeys("ab", (torch.float32, (2,))), half())
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
