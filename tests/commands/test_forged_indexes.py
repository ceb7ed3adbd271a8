"""Indexes of checkpoints that say anything, beside a manifest that vouches for them: one line."""

import copy
import os
import pickle
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from tests.support.mistakes import make_checkpoint, make_place, mistake
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.index import INDEX, read_index, shapes_in, tile
from torchmars.checkpoint.reader import read_tensors
from torchmars.checkpoint.resume import read_verified
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


def dtype(value):
    def change(index):
        index.state_dict_metadata[WEIGHT].properties.dtype = value

    return change


def shape(*size):
    def change(index):
        chunks(([0] * len(size), size))(index)
        index.state_dict_metadata[WEIGHT].size = torch.Size(size)

    return change


def same_place(index):
    """Let one weight lie where another one is."""
    other = MetadataIndex(WEIGHT.replace("blocks.0", "blocks.1"), [0, 0])
    index.storage_data[other] = index.storage_data[MetadataIndex(WEIGHT, [0, 0])]


def forget(index):
    del index.storage_data[MetadataIndex(WEIGHT, [0, 0])]


TILING = f"{WEIGHT} is in chunks that leave a gap, overlap or go beyond it"
FILE = "which is no file of the manifest's"
WRONG = {
    "half": (chunks(([0, 0], [16, 32])), TILING),
    "none": (entry(chunks=[]), TILING),
    "gap": (chunks(([0, 0], [16, 32]), ([17, 0], [15, 32])), TILING),
    "overlap": (chunks(([0, 0], [20, 32]), ([16, 0], [16, 32])), TILING),
    "twice": (chunks(([0, 0], [32, 32]), ([0, 0], [32, 32])), TILING),
    "both": (chunks(([0, 0], [20, 32]), ([16, 0], [12, 32])), TILING),
    "beyond": (chunks(([0, 0], [33, 32])), TILING),
    "before": (chunks(([-1, 0], [33, 32])), "with a negative size"),
    "negative": (chunks(([0, 0], [64, 32]), ([64, 0], [-32, 32])), "with a negative size"),
    "other dims": (chunks(([0], [1024])), "in 2 dims, and chunks in others"),
    "many dims": (shape(*[2] * 10), "in 10 dims"),
    "no sizes": (
        entry(chunks=[ChunkStorageMetadata([0, 0], [32, 32])]),
        "is not an index of tensors",
    ),
    "no chunks": (entry(chunks=None), "is not an index of tensors"),
    "no dtype": (dtype("float32"), "is not an index of tensors"),
    "objects": (
        lambda index: index.state_dict_metadata.update({WEIGHT: BytesStorageMetadata()}),
        "which no index holds",
    ),
    "transposed": (shape(16, 64), "in another shape or dtype than the index says"),
    "flat": (shape(1024), "in another shape or dtype than the index says"),
    "integers": (dtype(torch.int32), "in another shape or dtype than the index says"),
    "half as precise": (dtype(torch.bfloat16), "in another shape or dtype than the index says"),
    "more precise": (dtype(torch.float64), f"{WEIGHT} needs 8192 bytes, and has"),
    "file above": (place(relative_path="../../x"), f"lies in '../../x', {FILE}"),
    "device": (place(relative_path="/dev/zero"), f"lies in '/dev/zero', {FILE}"),
    "file of the user": (place(relative_path="notes"), f"lies in 'notes', {FILE}"),
    "itself": (place(relative_path=INDEX), f"lies in '{INDEX}', {FILE}"),
    "no file": (place(relative_path=[]), "is not an index of tensors"),
    "transformed": (place(transform_descriptors=["zstd"]), "is not an index of tensors"),
    "behind the end": (place(offset=10**12), "overlap in __0_0.distcp, or lie beyond its end"),
    "before the file": (place(offset=-1), "overlap in __0_0.distcp, or lie beyond its end"),
    "short": (place(length=4095), f"{WEIGHT} needs 4096 bytes, and has 4095"),
    "text": (place(length="4096"), "is not an index of tensors"),
    "same place": (same_place, "tensors overlap in __0_0.distcp"),
    "no place": (forget, f"it does not say where {WEIGHT} lies"),
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
    for work, given in (
        (read_verified, (checkpoint, "full")),
        (load_model, (run,)),
        (read, (checkpoint,)),
    ):
        said = mistake(work, *given)
        assert str(checkpoint) in said and re.search(message, said), said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a good checkpoint."""
    folder = tmp_path_factory.mktemp("forged")
    make_place(folder)
    checkpoint = make_checkpoint(folder)
    read(checkpoint)
    assert (
        mistake(read_verified, checkpoint, "full")
        == mistake(load_model, folder / "runs" / "tiny")
        == ""
    )
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
    "another shape": (torch.zeros(16, 64), "in another shape or dtype than the index says"),
    "another dtype": (torch.zeros(32, 32).int(), "in another shape or dtype than the index says"),
    "sparse": (torch.zeros(32, 32).to_sparse(), "in another shape or dtype than the index says"),
    "two": ([torch.zeros(32, 32)] * 2, "in another shape or dtype than the index says"),
    "a bomb": (Bomb(), f"has no tensor where {WEIGHT} should be"),
    "a bomb beside it": ([torch.zeros(32, 32), Bomb()], f"has no tensor where {WEIGHT} should be"),
}


@pytest.mark.parametrize("case", STORED)
def test_what_is_stored_is_what_the_index_says(checkpoint, monkeypatch, case):
    """And torch's advice, to unpickle whatever there is, is not passed on."""
    monkeypatch.chdir(checkpoint.parent)
    value, message = STORED[case]
    torch.save(value, checkpoint / "__9_0.distcp")
    size = (checkpoint / "__9_0.distcp").stat().st_size
    with (checkpoint / "__9_0.distcp").open("ab") as stream:
        stream.write(bytes(2**16))
    vouch_for(checkpoint, "__9_0.distcp")
    forge(checkpoint, place(relative_path="__9_0.distcp", offset=0, length=max(size, 4096)))
    refused(checkpoint, message)
    assert (
        "weights_only" not in mistake(read, checkpoint) and not (checkpoint.parent / "ran").exists()
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", INDEX, "manifest.json"])
def test_a_fifo_hangs_nobody(checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refused(checkpoint, f"{name} cannot be read: Not a regular file")


def divided(random, size):
    """Divide a tensor at random."""
    boxes = [([0] * len(size), size)]
    for _ in range(random.integers(0, 6)):
        begin, length = boxes[which := random.integers(len(boxes))]
        if dims := [dim for dim, each in enumerate(length) if each > 1]:
            dim = random.choice(dims)
            first, second, then = list(length), list(length), list(begin)
            first[dim] = int(random.integers(1, length[dim]))
            second[dim] -= first[dim]
            then[dim] += first[dim]
            boxes[which : which + 1] = [(begin, first), (then, second)]
    return boxes


def spoiled(random, boxes):
    """Double, drop, move or enlarge one of the boxes."""
    begin, length = boxes[which := random.integers(len(boxes))]
    dim = random.integers(len(begin)) if begin else None
    more = [int(each == dim) for each in range(len(begin))]
    others = boxes[:which] + boxes[which + 1 :]
    return (
        others
        + [
            [(begin, length)] * 2,
            [],
            [([a + b for a, b in zip(begin, more)], length)],
            [(begin, [a + b for a, b in zip(length, more)])],
        ][random.integers(4)]
    )


def test_boxes_tile_a_tensor_where_each_element_is_in_one():
    """As counting shows, of random divisions."""
    random = np.random.default_rng(0)
    found = set()
    for number in range(1000):
        size = random.integers(1, 4, number % 4).tolist()
        boxes = divided(random, size)
        for _ in range(random.integers(0, 3)):
            boxes = spoiled(random, boxes) or boxes
        count = np.zeros([2 * each + 10 for each in size], int)
        for begin, length in boxes:
            count[tuple(slice(a, a + b) for a, b in zip(begin, length))] += 1
        whole = np.zeros_like(count)
        whole[tuple(slice(each) for each in size)] = 1
        expected = bool((count == whole).all())
        assert tile(size, boxes) == expected, (size, boxes)
        found.add((len(size), expected))
    assert found == {(dims, whole) for dims in range(4) for whole in (False, True)}
    assert tile([0, 3], []) and not tile([0, 3], [([0, 0], [1, 3])]) and not tile([2], [])
