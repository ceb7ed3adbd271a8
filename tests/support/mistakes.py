"""What users get wrong, and what must become of it."""

import contextlib
import io
import os
import signal
from dataclasses import asdict

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.checkpoint.folder import step_folder
from torchmars.checkpoint.manifest import CheckpointManifest, describe_file
from torchmars.checkpoint.state_dict import model_state, optimizer_state_names
from torchmars.config.load import load_config
from torchmars.core.errors import UserError, say_error
from torchmars.models import build_meta_model
from torchmars.models.initialize import init_weights
from torchmars.storage.storage import MANIFEST
from torchmars.training.optimizer import build_optimizer
from torchmars.training.preparation import prepare_data


@contextlib.contextmanager
def in_time(seconds=120):
    """Fail where the body hangs, as in the opening of a FIFO."""

    def give_up(*_):
        raise AssertionError(f"it hangs: nothing in {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mistake(work, *args):
    """The line that a command ends with where `work` raises `UserError`; else nothing.

    Any other exception is our own mistake.
    """
    err = io.StringIO()
    with in_time(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            work(*args)
            return ""
        except UserError as error:
            err.truncate(err.seek(0))
            say_error(error)
    said = err.getvalue()
    assert said.startswith("error: ") and said.endswith("\n") and len(said) < 1100
    assert said[:-1].isprintable()
    return said


def make_place(folder):
    """A config, text, shards, and all kinds of files that are not what they should be."""
    write_text(folder)
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "loop").symlink_to("loop")
    (folder / "file").write_text("x")
    (folder / "weights.safetensors").write_text("x")
    (folder / "folder").mkdir()
    (folder / "folder.safetensors").mkdir()
    (folder / "folder" / "other.pdf").write_text("x")
    config = tiny_config(folder, training={"steps": 1})
    prepare_data(config)
    write_config(config, folder / "tiny.toml")


def make_checkpoint(folder, steps=2):
    """A run's checkpoint as far as commands without ranks read it: its weights alone."""
    config = load_config([str(folder / "tiny.toml")], "test")
    manifest = prepare_data(config)
    checkpoint = step_folder(folder / "runs" / "tiny" / "checkpoints", steps)
    checkpoint.mkdir(parents=True)
    model = build_meta_model(config.model, manifest.vocab_size, config.training.seq_len)
    names = optimizer_state_names(build_optimizer(config, model))
    init_weights(model.to_empty(device="cpu"), 0)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            model_state(model.state_dict()),
            storage_writer=dcp.FileSystemWriter(checkpoint),
            no_dist=True,
        )
    files = {path.name: describe_file(path) for path in checkpoint.iterdir()}
    saved = asdict(config)
    # As a run resolves them.
    saved["training"]["dtype"] = saved["optimizer"]["matrix_dtype"] = "float32"
    whole = CheckpointManifest(
        step=steps,
        position=16 * steps,
        world_size=1,
        data_fingerprint=prepare_data(config).fingerprint(),
        vocab_size=manifest.vocab_size,
        optimizer=names,
        config=saved,
        validation_loss=5.5,
        recent_losses=[5.0],
        files=files,
    )
    (checkpoint / MANIFEST).write_text(whole.text())
    return checkpoint
