"""Token files of nanoGPT, llm.c and Megatron, written here by the definitions of those formats."""

import contextlib
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import tiny_config
from tests.support.token_files import (
    END,
    FORMATS,
    TRAIN,
    VALIDATION,
    config_of,
    llama3,
    write_llmc,
    write_megatron,
    write_nanogpt,
)
from torchmars.core.errors import UserError
from torchmars.data import foreign
from torchmars.data.corpus import Sizes
from torchmars.data.manifest import read_manifest
from torchmars.data.prepare import prepare_shards, prepare_task
from torchmars.data.shards import check_shards
from torchmars.data.windows import Windows
from torchmars.training.preparation import prepare_data, prepare_run


def names(kind, split, number=0):
    if kind.startswith("nanogpt"):
        return {"train": "train.bin", "validation": "val.bin"}[split]
    middle = {"train": "train", "validation": "val"}[split]
    end = "_text_document" if kind.startswith("megatron") else ""
    return f"fineweb_{middle}_{number:06d}{end}.bin"


def all_windows(config, manifest, split, seq_len=32):
    folder = config.data.path
    windows = Windows(
        type(config.run.path)(folder), manifest.splits[split], manifest.dtype, seq_len
    )
    return [windows[number].tolist() for number in range(len(windows))]


def expected_windows(texts, seq_len=32):
    tokens = np.concatenate(texts).tolist()
    count = (len(tokens) - 1) // seq_len
    return [tokens[n * seq_len : (n + 1) * seq_len + 1] for n in range(count)]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read_in_place(tmp_path, kind):
    write, source, dtype = FORMATS[kind]
    config = config_of(tmp_path, source)
    folder = tmp_path / "tokens"
    halves = [TRAIN] if kind == "nanogpt" else [TRAIN[:30], TRAIN[30:]]
    for number, half in enumerate(halves):
        write(folder / names(kind, "train", number), half)
    write(folder / names(kind, "validation"), VALIDATION)
    if not kind.startswith("megatron") and "glob" not in kind:
        (folder / "test.bin").write_bytes(b"other")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    prepare_task(config.data, 0, 1, Sizes(shard_tokens=700))  # so that a file is several shards
    [part] = prepare_data(config).parts
    manifest = part.manifest
    assert manifest.dtype == dtype and len(manifest.splits["train"].shards) > 4
    assert all_windows(config, manifest, "train") == expected_windows(TRAIN)
    assert all_windows(config, manifest, "validation") == expected_windows(VALIDATION)
    counted = {name: split.documents for name, split in manifest.splits.items()}
    assert counted == {"train": 50, "validation": 10}
    assert {split.max_token for split in manifest.splits.values()} == {END}
    check_shards(manifest, part.folder)
    assert read_manifest(part.folder) == prepare_shards(config.data) == manifest
    assert [file.name for file in part.folder.iterdir()] == ["manifest.json"]
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["nanogpt", "megatron"])
def test_without_validation_tokens_the_last_training_tokens_are_that(tmp_path, kind):
    write, source, _ = FORMATS[kind]
    config = config_of(tmp_path, source, validation_fraction=0.1)
    write(tmp_path / "tokens" / names(kind, "train"), TRAIN)
    manifest = prepare_data(config).parts[0].manifest
    tokens = np.concatenate(TRAIN)
    at = len(tokens) - int(len(tokens) * 0.1)
    assert all_windows(config, manifest, "train") == expected_windows([tokens[:at]])
    assert all_windows(config, manifest, "validation") == expected_windows([tokens[at:]])
    train, validation = manifest.splits["train"].shards[0], manifest.splits["validation"].shards[0]
    assert train.file == validation.file and validation.offset == 2 * train.tokens == 2 * at
    assert sum(split.documents for split in manifest.splits.values()) == 50


def damage(offset, length=1):
    def change(data):
        return (
            data[:offset]
            + bytes(byte ^ 1 for byte in data[offset : offset + length])
            + data[offset + length :]
        )

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda data: data[:-2], r"train.bin has \d+ bytes, its manifest says at least \d+"),
        (damage(100), "train.bin was altered"),
        (damage(-100), "train.bin was altered"),  # of the validation split
    ],
)
def test_a_file_that_changes_later_is_named_as_verify_says(tmp_path, change, message):
    config = config_of(tmp_path, "nanogpt:{}")
    file = tmp_path / "tokens" / "train.bin"
    write_nanogpt(file, TRAIN)
    prepare_data(config)
    file.write_bytes(file.read_bytes() + b"\0\0")  # what is added is not read
    prepare_run(config, 1, 1)
    file.write_bytes(change(file.read_bytes()[:-2]))
    with pytest.raises(UserError, match=message):
        prepare_data(config).verify(config.data.verify)  # as the ranks do
    prepare_run(config_of(tmp_path, "nanogpt:{}", verify="off"), 1, 1)
    # The launcher leaves the bytes to the ranks.
    for level in ("full", "size"):
        config = config_of(tmp_path, "nanogpt:{}", verify=level)
        if "altered" in message:
            prepare_run(config, 1, 1)
        else:
            with pytest.raises(UserError, match=message):
                prepare_run(config, 1, 1)


def with_token(write, token, **options):
    return lambda file: write(file, [*TRAIN[:20], np.array([token, END])], **options)


def written(write, change, suffix=".bin", **options):
    def make(file):
        write(file, TRAIN[:20], **options)
        file = file.with_suffix(suffix)
        file.write_bytes(change(file.read_bytes()))

    return make


def same(data):
    return data


MISTAKES = {
    "odd": (
        "nanogpt",
        written(write_nanogpt, lambda data: data[:-1]),
        "train.bin has .* no uint16",
    ),
    "empty": ("nanogpt", written(write_nanogpt, lambda data: b""), "train.bin has 0 bytes"),
    "folder": ("nanogpt", lambda file: file.mkdir(), "train.bin cannot be read .Is a directory"),
    "beyond": (
        "nanogpt",
        with_token(write_nanogpt, 50256),
        'train.bin has token id 50256, beyond the 257 of data.tokenizer = "bytes": set the',
    ),
    "magic": ("llmc", written(write_llmc, same, magic=20240522), "magic number 20240522, llm.c's"),
    "version": ("llmc", written(write_llmc, same, version=2), "has version 2, 1 is read"),
    "old llama": ("llmc", written(write_llmc, same, magic=20240801), "has version 1, 7 is read"),
    "count": (
        "llmc",
        written(write_llmc, lambda data: data[:-2]),
        r"has \d+ bytes after its header, which says \d+ uint16 tokens",
    ),
    "odd llmc": ("llmc", written(write_llmc, lambda data: data[:-1]), "bytes after its header"),
    "header": ("llmc", written(write_llmc, lambda data: data[:1000]), "ends within its header"),
    "large id": (
        "llmc",
        with_token(llama3, 128_000),
        "fineweb_train_000000.bin has token id 128000, beyond the 257",
    ),
    "megatron magic": (
        "megatron",
        written(write_megatron, same, magic=b"TNTIDX\x00\x00\x00"),
        ".idx does not begin as Megatron's indices do",
    ),
    "megatron version": ("megatron", written(write_megatron, same, version=3), "version 3, 1 is"),
    "int64": ("megatron", written(write_megatron, same, code=5), "tokens are int64: uint16 and"),
    "float": ("megatron", written(write_megatron, same, code=7), "tokens are float32"),
    "no dtype": ("megatron", written(write_megatron, same, code=99), "tokens are code 99"),
    "index": (
        "megatron",
        written(write_megatron, lambda data: data[:-8], ".idx"),
        r"idx has \d+ bytes instead of \d+",
    ),
    "short index": (
        "megatron",
        written(write_megatron, lambda data: data[:20], ".idx"),
        "idx ends within its header",
    ),
    "other bin": (
        "megatron",
        written(write_megatron, lambda data: data[:-2]),
        r"idx does not fit \S+bin, which has \d+ bytes: the index says \d+ uint16 tokens",
    ),
    "other lengths": ("megatron", written(write_megatron, damage(34), ".idx"), "idx does not fit"),
    "other documents": (
        "megatron",
        written(write_megatron, damage(-8), ".idx"),
        "idx does not fit",
    ),
    "no index": (
        "megatron",
        lambda file: (write_megatron(file, TRAIN), file.with_suffix(".idx").unlink()),
        r"idx cannot be read \(No such file",
    ),
    "negative": (
        "megatron",
        with_token(write_megatron, -1, code=4, dtype="<i4"),
        "token id 4294967295, beyond the 257",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, name):
    kind, make, message = MISTAKES[name]
    config = config_of(tmp_path, f"{kind}:{{}}")
    make(tmp_path / "tokens" / names(kind, "train"))
    with pytest.raises(UserError, match=message) as mistake:
        prepare_data(config)
    assert "\n" not in str(mistake.value) and "fineweb_" in str(mistake.value) or kind == "nanogpt"
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("kind", ["llmc", "megatron"])
def test_a_header_that_says_anything_is_read_or_refused(tmp_path, kind):
    file = tmp_path / "x_train.bin"
    FORMATS[kind][0](file, TRAIN[:3])
    header = file if kind == "llmc" else file.with_suffix(".idx")
    whole = header.read_bytes()

    @settings(derandomize=True, database=None, deadline=None, max_examples=200)
    @given(st.integers(0, 120), st.binary(min_size=1, max_size=9), st.integers(0, len(whole)))
    def check(place, other, size):
        header.write_bytes((whole[:place] + other + whole[place + len(other) :])[-size:])
        with contextlib.suppress(UserError):
            tokens = foreign.READERS[kind](file)
            assert tokens.end == file.stat().st_size

    check()


def test_nothing_found_other_dtypes_and_only_validation_are_told(tmp_path):
    config = config_of(tmp_path, "llmc:{}")
    with pytest.raises(UserError, match=r'"llmc:\S+" finds no file \S+tokens/\*train\*.bin or'):
        prepare_data(config)
    for source, said in {
        "nanogpt:data/openwebtext": "no folder data/openwebtext with train.bin and val.bin: run "
        rf"nanoGPT's prepare.py, or name its folder \(paths count from .*{re.escape(os.getcwd())}",
        "llmc:/data/fineweb": "no folder /data/fineweb with .* of llm.c .*correct the path",
        "nanogpt:data/x*": r"finds no file data/x\*: paths count from the folder that you start in",
        "nanogpt:tokens.bin": "finds no file tokens.bin: paths count",
        "megatron:tokens": "finds no file tokens.bin: paths count",
    }.items():
        with pytest.raises(UserError, match=said):
            foreign.find_files(source, *source.split(":"))
    write_llmc(tmp_path / "tokens" / "x_val_0.bin", TRAIN)
    with pytest.raises(UserError, match="has validation tokens only"):
        prepare_data(config)
    llama3(tmp_path / "tokens" / "x_train_0.bin", TRAIN)
    with pytest.raises(UserError, match="x_val_0.bin has uint16 tokens, .*x_train_0.bin uint32"):
        prepare_data(config)


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
def test_one_token_is_too_few(tmp_path, kind):
    config = config_of(tmp_path, f"{kind}:{{}}")
    file = tmp_path / "tokens" / names(kind, "train")
    FORMATS[kind][0](file, [np.array([7])])
    with pytest.raises(UserError, match=f"{file.name} has one token, all there is: add training"):
        prepare_data(config)
    assert not (tmp_path / "shards").exists()


def test_tokens_beyond_the_model_are_told(tmp_path):
    write_nanogpt(tmp_path / "train.bin", TRAIN)
    data = {"source": f"nanogpt:{tmp_path}", "files": []}
    with pytest.raises(UserError, match="token id 256, beyond model.vocab_size = 200"):
        prepare_data(tiny_config(tmp_path, data=data, model={"vocab_size": 200}))


def test_token_files_can_be_packed(tmp_path):
    config = config_of(tmp_path, "nanogpt:{}", packing="best_fit")
    write_nanogpt(tmp_path / "tokens" / "train.bin", TRAIN)
    data = prepare_data(config)
    windows = data.windows("train", 32)
    read = [windows[0, number].tolist() for number in range(windows.lengths[0])]
    stream = data.parts[0].manifest.splits["train"].tokens
    assert len(read) == (stream - 1) // 32
    ends = sum(window.count(END) for window in (each[:-1] for each in read))
    assert ends > 40  # of 50 documents, as inputs
    pairs = set(map(tuple, expected_windows(TRAIN, 1)))
    assert all(pair in pairs for each in read for pair in zip(each, each[1:]) if END not in pair)
