"""Folders of shards that older versions wrote, tokens of 32 bits, and folders of other versions."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.shards import write_shards
from tests.support.tiny import tiny_config, write_text
from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.core.formats import OtherVersion
from torchmars.data.manifest import FORMAT, read_manifest
from torchmars.data.shards import check_shards
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import Windows
from torchmars.training.preparation import prepare_data

DOCUMENTS = ["a fox " * 20, "an old hill " * 20, "and a river " * 20]


def write_as_version_2(folder, shard_tokens=100):
    """Write the shards of DOCUMENTS as version 2 did: uint16 and no checksum of the manifest."""
    folder.mkdir()
    ends = [np.frombuffer(text.encode(), np.uint8).astype("<u2") for text in DOCUMENTS]
    ends = [np.append(tokens, 256).astype("<u2") for tokens in ends]
    splits = {}
    for name, tokens, documents in (
        ("train", np.concatenate([ends[0], ends[2]]), 2),
        ("validation", ends[1], 1),
    ):
        shards = []
        for begin in range(0, len(tokens), shard_tokens):
            part = tokens[begin : begin + shard_tokens]
            file = f"{name}-{len(shards):05d}.bin"
            (folder / file).write_bytes(part.tobytes())
            digest = hashlib.sha256(part.tobytes()).hexdigest()
            shards.append({"file": file, "tokens": len(part), "sha256": digest})
        splits[name] = {
            "tokens": len(tokens),
            "documents": documents,
            "max_token": 256,
            "shards": shards,
        }
    manifest = {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "corpus": "text",
        "files": ["text.txt"],
        "splits": splits,
        "validation_fraction": 0.01,
        "format": "torchmars-shards-2",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def as_version_1(folder):
    """Make what version 1 wrote of what version 2 wrote."""
    entries = json.loads((folder / "manifest.json").read_text())
    del entries["validation_fraction"]
    entries["format"] = "torchmars-shards-1"
    (folder / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")


def contents(split):
    """What a split holds, whatever its files are called."""
    shards = [(shard.tokens, shard.sha256) for shard in split.shards]
    return split.tokens, split.documents, split.max_token, shards


def fingerprint_as_version_2(folder):
    entries = json.loads((folder / "manifest.json").read_text())
    shards = entries["splits"]["train"]["shards"]
    return hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()


def test_what_older_versions_wrote_is_read_and_is_the_same_data(tmp_path):
    write_as_version_2(tmp_path / "old")
    config = DataConfig(source="text", files=["text.txt"])
    new = write_shards(config, ByteTokenizer(), iter(DOCUMENTS), tmp_path / "new", 100)
    assert read_manifest(tmp_path / "new") == new
    for version in (2, 1):
        if version == 1:
            as_version_1(tmp_path / "old")
        old = read_manifest(tmp_path / "old")
        assert old.dtype == new.dtype == "uint16"
        assert [contents(split) for split in old.splits.values()] == [
            contents(split) for split in new.splits.values()
        ]
        assert old.fingerprint() == new.fingerprint() == fingerprint_as_version_2(tmp_path / "old")
        check_shards(old, tmp_path / "old")
        windows = [
            Windows(folder, manifest.splits["train"], manifest.dtype, 16)
            for folder, manifest in ((tmp_path / "old", old), (tmp_path / "new", new))
        ]
        first, second = ([each[n].tolist() for n in range(len(each))] for each in windows)
        assert first == second


class LargeTokenizer(ByteTokenizer):
    """A token per character, far from each other."""

    name = "large"
    vocab_size = 128 * 1000
    end_of_text = vocab_size - 1

    def encode_batch(self, texts):
        return [np.array([1000 * ord(letter) for letter in text], np.uint32) for text in texts]


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
    with pytest.raises(UserError, match="train-00000-001.bin has 198 bytes, its manifest says 200"):
        check_shards(manifest, folder)


@pytest.mark.parametrize("vocab_size,dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_largest_vocabulary_of_16_bits(tmp_path, vocab_size, dtype):
    class Tokenizer(ByteTokenizer):
        end_of_text = vocab_size - 1

    Tokenizer.vocab_size = vocab_size
    manifest = write_shards(DataConfig(), Tokenizer(), iter(DOCUMENTS), tmp_path / "shards")
    assert manifest.dtype == dtype
    tokens = np.fromfile(tmp_path / "shards" / "train-00000-000.bin", np.dtype(dtype))
    assert (
        tokens[-1] == vocab_size - 1 == read_manifest(tmp_path / "shards").splits["train"].max_token
    )


@pytest.mark.parametrize("checksum", [True, False])
def test_a_folder_of_another_version_is_named_and_left_alone(tmp_path, checksum):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    file = tmp_path / "shards" / "manifest.json"
    entries = json.loads(file.read_text())
    del entries["format"], entries["sha256"]
    file.write_text(
        replace(FORMAT, written=9).text(entries)
        if checksum
        else json.dumps({"format": "torchmars-shards-9"} | entries)
    )
    before = file.read_bytes()
    with pytest.raises(
        OtherVersion,
        match="shards/manifest.json is of format torchmars-shards-9, which this version cannot "
        "read: .* set data.path to a new folder",
    ):
        prepare_data(config)
    assert file.read_bytes() == before


def test_a_manifest_of_this_version_that_was_altered_is_named(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    file = tmp_path / "shards" / "manifest.json"
    whole = file.read_text()
    for old, new in (("bytes", "bites"), ("shards-4", "shards-1"), ('"dtype"', '"dtypes"')):
        file.write_text(whole.replace(old, new))
        with pytest.raises(UserError, match="altered: it does not match its own checksum"):
            prepare_data(config)


def test_a_token_id_that_does_not_fit_is_refused(tmp_path):
    write_as_version_2(tmp_path / "old")
    file = tmp_path / "old" / "manifest.json"
    file.write_text(file.read_text().replace('"max_token": 256', '"max_token": 65536'))
    with pytest.raises(UserError, match="a token id does not fit uint16"):
        read_manifest(tmp_path / "old")
