"""Tokens of 32 bits, and folders of other versions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.shards import write_shards
from tests.support.tiny import tiny_config, write_text
from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.core.formats import OtherVersion
from torchmars.data.manifest import FORMAT, check_shards, read_manifest
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import Windows
from torchmars.training.preparation import prepare_data

DOCUMENTS = ["a fox " * 20, "an old hill " * 20, "and a river " * 20]


class LargeTokenizer(ByteTokenizer):
    """A token per character, far from each other."""

    name = "large"
    vocab_size = 128 * 1000
    end_of_text = vocab_size - 1

    def encode(self, text):
        return np.array([1000 * ord(letter) for letter in text], np.uint32)


def test_tokens_of_a_large_vocabulary_have_32_bits(tmp_path):
    folder = tmp_path / "shards"
    write_shards(DataConfig(), LargeTokenizer(), iter(DOCUMENTS), folder, shard_tokens=50)
    manifest = read_manifest(folder)
    split = manifest.splits["train"]
    assert manifest.dtype == "uint32" and manifest.vocab_size == 128_000
    assert split.max_token == 127_999 and len(split.shards) > 5
    expected = []
    for text in (DOCUMENTS[0], DOCUMENTS[2]):
        expected += [*(1000 * ord(letter) for letter in text), 127_999]
    assert (folder / split.shards[0].file).read_bytes() == np.array(expected[:50], "<u4").tobytes()
    check_shards(manifest, folder)
    windows = Windows(folder, split, manifest.dtype, 16)
    assert len(windows) == (len(expected) - 1) // 16
    for number in range(len(windows)):
        assert windows[number].tolist() == expected[16 * number : 16 * number + 17]
    file = folder / split.shards[1].file
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(
        UserError, match="train-00001.bin has 198 bytes, its manifest says at least 200"
    ):
        check_shards(manifest, folder)


@pytest.mark.parametrize("vocab_size,dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_largest_vocabulary_of_16_bits(tmp_path, vocab_size, dtype):
    class Tokenizer(ByteTokenizer):
        end_of_text = vocab_size - 1

    Tokenizer.vocab_size = vocab_size
    manifest = write_shards(DataConfig(), Tokenizer(), iter(DOCUMENTS), tmp_path / "shards")
    assert manifest.dtype == dtype
    tokens = np.fromfile(tmp_path / "shards" / "train-00000.bin", np.dtype(dtype))
    assert (
        tokens[-1] == vocab_size - 1 == read_manifest(tmp_path / "shards").splits["train"].max_token
    )


@pytest.mark.parametrize("version,checksum", [(3, True), (9, True), (9, False)])
def test_a_folder_of_another_version_is_named_and_left_alone(tmp_path, version, checksum):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    file = tmp_path / "shards" / "manifest.json"
    entries = json.loads(file.read_text())
    del entries["format"], entries["sha256"]
    file.write_text(
        replace(FORMAT, version=version).text(entries)
        if checksum
        else json.dumps({"format": f"torchmars-shards-{version}"} | entries)
    )
    before = file.read_bytes()
    with pytest.raises(
        OtherVersion,
        match=f"shards/manifest.json is of format torchmars-shards-{version}, which this version "
        "cannot read: .* set data.path to a new folder",
    ):
        prepare_data(config)
    assert file.read_bytes() == before


def test_a_manifest_of_this_version_that_was_altered_is_named(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    file = tmp_path / "shards" / "manifest.json"
    whole = file.read_text()
    for old, new in (("bytes", "bites"), ("shards-7", "shards-1"), ('"dtype"', '"dtypes"')):
        file.write_text(whole.replace(old, new))
        with pytest.raises(UserError, match="altered: it does not match its own checksum"):
            prepare_data(config)
