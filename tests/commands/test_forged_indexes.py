"""Indexes of checkpoints that others made, beside a manifest that vouches for them: one line."""

import copy
import os
import pickle
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from tests.support.mistakes import make_checkpoint, make_place, mistake
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.reader import INDEX, read_index, read_tensors, shapes_in
from torchmars.exchange.saved_model import load_model
from torchmars.storage.storage import MANIFEST

WEIGHT = "model.blocks.0.attn.proj.weight"


def forge(checkpoint, change):
    """Write the index anew with what `change` makes of it, and a manifest that fits."""
    index = pickle.loads((checkpoint / INDEX).read_bytes())
    change(index)
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))
    vouch_for(checkpoint, INDEX)


def vouch_for(checkpoint, name):
    """Write the manifest anew so that it is one of the file as it is now."""
    manifest = manifests.read(checkpoint)
    files = manifest.files | {name: manifests.describe_file(checkpoint / name)}
    (checkpoint / MANIFEST).write_text(replace(manifest, files=files).text())


def chunks(*boxes):
    """Divide the weight, of 32 x 32, into boxes: the first index and the size of each."""

    def change(index):
        place = index.storage_data.pop(MetadataIndex(WEIGHT, [0, 0]))
        made = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        index.state_dict_metadata[WEIGHT].chunks = made
        index.storage_data |= {MetadataIndex(WEIGHT, at): copy.copy(place) for at, _ in boxes}

    return change


def place(**values):
    def change(index):
        for name, value in values.items():
            setattr(index.storage_data[MetadataIndex(WEIGHT, [0, 0])], name, value)

    return change


def entry(**values):
    def change(index):
        for name, value in values.items():
            setattr(index.state_dict_metadata[WEIGHT], name, value)

    return change


def shape(*size):
    def change(index):
        chunks(([0] * len(size), size))(index)
        index.state_dict_metadata[WEIGHT].size = torch.Size(size)

    return change


GAP = f"{WEIGHT} is in chunks that leave a gap or overlap"
FILE = "which is no file of the manifest's"
NONE = "has no tensor where one should be"
MODEL = "does not have the model that its manifest.json describes"
WRONG = {
    "half": (chunks(([0, 0], [16, 32])), GAP),
    "overlap": (chunks(([0, 0], [20, 32]), ([16, 0], [16, 32])), GAP),
    "no chunks": (entry(chunks=None), "is not an index of tensors"),
    "objects": (
        lambda index: index.state_dict_metadata.update({WEIGHT: BytesStorageMetadata()}),
        "which no index holds",
    ),
    "transposed": (shape(16, 64), f"{NONE}|{MODEL}"),
    "file above": (place(relative_path="../../x"), f"it names '../../x', {FILE}"),
    "device": (place(relative_path="/dev/zero"), f"it names '/dev/zero', {FILE}"),
    "no file": (place(relative_path=[]), "is not an index of tensors"),
    "no places": (lambda index: setattr(index, "storage_data", None), "is not an index of"),
    "no tensors": (lambda index: setattr(index, "state_dict_metadata", []), "is not an index of"),
}


def read(checkpoint):
    """Read a checkpoint as a run with checkpoint.verify = "off" does."""
    index = read_index(checkpoint, manifests.read(checkpoint))
    state = {name: torch.empty(size) for name, size in shapes_in(index).items()}
    read_tensors(checkpoint, state, index)


def refused(checkpoint, message):
    """Check that nobody takes the checkpoint for a good one."""
    run = checkpoint.parent.parent
    for work, given in ((load_model, run), (read, checkpoint)):
        said = mistake(work, given)
        assert str(checkpoint) in said and re.search(message, said), said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a good checkpoint."""
    folder = tmp_path_factory.mktemp("forged")
    make_place(folder)
    checkpoint = make_checkpoint(folder)
    read(checkpoint)
    assert mistake(load_model, folder / "runs" / "tiny") == ""
    return folder / "runs"


@pytest.fixture
def checkpoint(made, tmp_path):
    """A copy of it."""
    run = shutil.copytree(made, tmp_path / "runs") / "tiny"
    return run / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("case", WRONG)
def test_an_index_is_one_of_whole_tensors_in_files_of_the_manifest(checkpoint, case):
    change, message = WRONG[case]
    forge(checkpoint, change)
    refused(checkpoint, message)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


STORED = {
    "another shape": torch.zeros(16, 64),
    "two": [torch.zeros(32, 32)] * 2,
    "a bomb": Bomb(),
    "a bomb beside it": [torch.zeros(32, 32), Bomb()],
}


@pytest.mark.parametrize("case", STORED)
def test_what_is_stored_is_what_the_index_says(checkpoint, monkeypatch, case):
    """And torch's advice, to unpickle whatever there is, is not passed on."""
    monkeypatch.chdir(checkpoint.parent)
    torch.save(STORED[case], checkpoint / "__9_0.distcp")
    size = (checkpoint / "__9_0.distcp").stat().st_size
    with (checkpoint / "__9_0.distcp").open("ab") as stream:
        stream.write(bytes(2**16))
    vouch_for(checkpoint, "__9_0.distcp")
    forge(checkpoint, place(relative_path="__9_0.distcp", offset=0, length=max(size, 4096)))
    refused(checkpoint, NONE)
    assert (
        "weights_only" not in mistake(read, checkpoint) and not (checkpoint.parent / "ran").exists()
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", INDEX, "manifest.json"])
def test_a_fifo_hangs_nobody(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(checkpoint, f"{name} cannot be read: Not a regular file")
