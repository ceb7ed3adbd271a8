"""Text to shards and back, and one clear error for everything that can be wrong with a folder."""

import json
import os

import numpy as np
import pytest

from tests.support.damage import flip, sealed
from tests.support.tiny import tiny_config, write_text
from torchmars.core.errors import UserError
from torchmars.data import manifest as shards
from torchmars.data.manifest import read_manifest
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.training.preparation import prepare_data


@pytest.fixture
def prepared(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    return config, tmp_path / "shards", prepare_data(config).parts[0].manifest


def tokens_of(folder, split):
    return np.concatenate([np.fromfile(folder / shard.file, dtype="<u2") for shard in split.shards])


def test_shards_hold_the_documents_split_whole(prepared, tmp_path):
    config, folder, manifest = prepared
    documents = (tmp_path / "text.txt").read_text().split("<|endoftext|>")
    found = []
    for split in manifest.splits.values():
        tokens = tokens_of(folder, split)
        assert len(tokens) == split.tokens and tokens.max() == split.max_token == 256
        ends = np.flatnonzero(tokens == 256)
        assert len(ends) == split.documents and ends[-1] == len(tokens) - 1
        found += [ByteTokenizer().decode(part.tolist()) for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(text.strip() for text in found) == sorted(text.strip() for text in documents)
    validation, train = manifest.splits["validation"], manifest.splits["train"]
    assert 0.03 < validation.tokens / (validation.tokens + train.tokens) < 0.1
    assert prepare_data(config).parts[0].manifest == manifest == read_manifest(folder)


def test_a_single_document_is_cut_near_its_end(tmp_path):
    (tmp_path / "text.txt").write_text("abcde" * 1000)
    manifest = prepare_data(tiny_config(tmp_path)).parts[0].manifest
    assert manifest.splits["train"].tokens == 4751 and manifest.splits["validation"].tokens == 250


@pytest.mark.parametrize(
    "change,message",
    [
        (
            lambda file: os.truncate(file, file.stat().st_size - 2),
            r"-00000.bin has \d+ bytes, its manifest says at least \d+",
        ),
        (lambda file: flip(file, 800), "train-00000.bin was altered"),
    ],
)
def test_damaged_shards_are_named(prepared, change, message):
    _, folder, manifest = prepared
    change(folder / "train-00000.bin")
    with pytest.raises(UserError, match=message):
        shards.check_shards(manifest, folder)


def test_ranks_share_the_check(prepared):
    _, folder, manifest = prepared
    flip(folder / "validation-00000.bin", 800)
    shards.check_shards(manifest, folder, part=0, parts=2)
    with pytest.raises(UserError, match="validation-00000.bin was altered"):
        shards.check_shards(manifest, folder, part=1, parts=2)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda m: "{", "is no manifest of this version"),
        (lambda m: m | {"format": "other"}, "is no manifest of this version .*other"),
        (lambda m: {k: v for k, v in m.items() if k != "splits"}, "is no manifest of this version"),
        (
            lambda m: m | {"made_from": m["made_from"] | {"data.tokenizer": "gpt2"}},
            'prepared with data.tokenizer = "gpt2", now it is "bytes"',
        ),
        (
            lambda m: m | {"made_from": m["made_from"] | {"data.files": ["other.txt"]}},
            "prepared with data.files",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(prepared, change, message):
    config, folder, _ = prepared
    path = folder / "manifest.json"
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else sealed(changed))
    with pytest.raises(UserError, match=message):
        prepare_data(config)


@pytest.mark.parametrize(
    "overrides,message",
    [
        (
            {"training": {"global_batch_size": 10_000}},
            r"is too small: [\d,]+ tokens, and a step needs 10000 x 32:",
        ),
        (
            {"training": {"seq_len": 5000, "global_batch_size": 1}},
            r"the validation split of .* is too small: [\d,]+ tokens, and a step needs 1 x 5000",
        ),
        ({"model": {"vocab_size": 200}}, "token id 256, beyond model.vocab_size = 200"),
        ({"model": {"n_head": 3}}, "n_embd = 32 does not divide into model.n_head = 3"),
    ],
)
def test_data_that_does_not_fit_the_run_is_refused(prepared, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        prepare_data(tiny_config(tmp_path, **overrides))


def test_text_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"good\n\xff\xfe bad")
    with pytest.raises(UserError, match="no text.*text.txt, line 1: it is not UTF-8 .byte 5"):
        prepare_data(tiny_config(tmp_path))
    assert not (tmp_path / "shards").exists()
    (tmp_path / "text.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text"):
        prepare_data(tiny_config(tmp_path))
