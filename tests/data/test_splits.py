"""Which files of tokens are trained on, which validate, and which are left out."""

import numpy as np
import pytest

from tests.support.token_files import FORMATS, TRAIN, config_of, documents, write_llmc
from torchmars.data import foreign
from torchmars.data.foreign import find_files, split_of
from torchmars.data.prepare import prepare_shards


@pytest.mark.full
def test_words_of_names_tell_splits_as_in_data_sets_of_hugging_face():
    from datasets.data_files import SPLIT_KEYWORDS

    for split, words in SPLIT_KEYWORDS.items():
        for word in words:
            for name in (f"{word}.bin", f"gpt2_{word.upper()}_00001_text_document.bin"):
                assert foreign.split_of([name]) == split
            assert foreign.split_of([f"x{word}y.bin"]) == ""
    assert foreign.split_of(["test", "train-0.bin"]) == "train"
    assert foreign.split_of(["latest_devices.bin"]) == ""


SPLITS = ["train", "val", "valid", "dev", "test", "eval"]


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
@pytest.mark.parametrize("glob", ["", "/*", "/**/*"])
def test_test_tokens_are_in_no_split_and_what_is_left_out_is_said(tmp_path, capsys, kind, glob):
    write, source, _ = FORMATS[kind]
    end = "_text_document.bin" if kind == "megatron" else ".bin"
    config = config_of(tmp_path, source + (glob and glob + end))
    folder = tmp_path / "tokens"
    for number, split in enumerate(SPLITS):
        write(folder / f"x_{split}_0{end}", documents(3, number))
    (folder / f"._x_train_0{end}").write_bytes(b"other")
    (folder / f"y_train_0{end}").symlink_to(f"x_train_0{end}")
    (folder / f"y_train_0{end}").with_suffix(".idx").symlink_to("x_train_0_text_document.idx")
    splits = prepare_shards(config.data).splits
    for name, numbers in (("train", [0]), ("validation", [3, 1, 2])):
        texts = [text for number in numbers for text in documents(3, number)]
        assert splits[name].tokens == len(np.concatenate(texts))
        files = [shard.file for shard in splits[name].shards]
        assert files == [str(folder / f"x_{SPLITS[number]}_0{end}") for number in numbers]
    said = capsys.readouterr().out
    assert f"left out 2 files of test tokens (the first: {folder}/x_eval_0{end})" in said
    leftover = (
        f"left out 1 file that other programs have left beside the data (the first: {folder}/._"
    )
    assert leftover in said
    assert (
        f"left out 1 link to files that are read under another name (the first: {folder}/" in said
    )


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
def test_a_file_that_is_named_outright_is_trained_on(tmp_path, kind):
    write, source, _ = FORMATS[kind]
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "my_test.bin", TRAIN)
    config = config_of(tmp_path, f"{kind}:{tmp_path}/test/my_test.bin")
    splits = prepare_shards(config.data).splits
    assert sum(split.tokens for split in splits.values()) == len(np.concatenate(TRAIN))


def test_folders_tell_splits_too(tmp_path):
    for split in ("train", "dev", "test"):
        (tmp_path / "tokens" / split).mkdir(parents=True)
        write_llmc(tmp_path / "tokens" / split / "0.bin", documents(3, len(split)))
    splits = prepare_shards(config_of(tmp_path, "llmc:{}/*/*.bin").data).splits
    for name, split in (("train", "train"), ("validation", "dev")):
        assert [shard.file for shard in splits[name].shards] == [f"{tmp_path}/tokens/{split}/0.bin"]


@pytest.mark.parametrize(
    "name,split",
    [
        ("valset_0.bin", "validation"),
        ("trainset_0.bin", "train"),
        ("wiki_testset_text_document.bin", "test"),
        ("CorpusTest_text_document.bin", "test"),
        ("holdout_0.bin", "test"),
        ("latest.bin", ""),
    ],
)
def test_other_words_for_splits(name, split):
    assert split_of([name]) == split


def test_a_part_of_a_word_says_it_where_no_word_does(tmp_path):
    for name in ("fw10Btrain_0.bin", "fw10Bval_0.bin"):
        (tmp_path / name).write_bytes(bytes(64))
    found = find_files("nanogpt:x", "nanogpt", str(tmp_path))
    assert {split: [file.name for file in files] for split, files in found.items()} == {
        "train": ["fw10Btrain_0.bin"],
        "validation": ["fw10Bval_0.bin"],
        "test": [],
    }
