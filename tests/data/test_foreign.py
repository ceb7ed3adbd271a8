"""Token files of nanoGPT, llm.c and Megatron, written here by the definitions of those formats."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.token_files import (
    END,
    FORMATS,
    TRAIN,
    VALIDATION,
    config_of,
    documents,
    llama3,
    write_llmc,
    write_megatron,
    write_nanogpt,
)
from torchmars.core.errors import UserError
from torchmars.data import foreign
from torchmars.data.manifest import check_shards, read_manifest
from torchmars.data.prepare import prepare_shards
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
def test_each_format_is_read_in_place(tmp_path, kind, monkeypatch):
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
    monkeypatch.setattr(foreign, "SHARD_TOKENS", 700)  # so that a file is several shards
    prepare_shards(config.data)
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


def written(write, change=lambda data: data, suffix=".bin", **options):
    def make(file):
        write(file, TRAIN[:20], **options)
        file = file.with_suffix(suffix)
        file.write_bytes(change(file.read_bytes()))

    return make


NO_LLMC = "fineweb_train_000000.bin, of .* is no whole file of llmc tokens"
NO_INDEX = "000000_text_document.bin, of .* is no whole file of megatron .* with its .idx"
MISTAKES = {
    "odd": (
        "nanogpt",
        written(write_nanogpt, lambda data: data[:-1]),
        "train.bin, of .* is no whole file of nanogpt tokens",
    ),
    "empty": ("nanogpt", written(write_nanogpt, lambda data: b""), "train.bin, of 0 bytes"),
    "npy": (
        "nanogpt",
        lambda file: np.save(file.open("wb"), TRAIN[0]),
        "that begin with b..x93NUMPY",
    ),
    "of llm.c": ("nanogpt", written(write_llmc), "no whole file of nanogpt .* name its kind"),
    "beyond": (
        "nanogpt",
        with_token(write_nanogpt, 50256),
        'train.bin has token id 50256, beyond the 257 of data.tokenizer = "bytes": set the',
    ),
    "magic": ("llmc", written(write_llmc, magic=20240522), NO_LLMC),
    "old llama": ("llmc", written(write_llmc, magic=20240801), NO_LLMC),
    "count": ("llmc", written(write_llmc, lambda data: data[:-2]), NO_LLMC),
    "header": ("llmc", written(write_llmc, lambda data: data[:9]), NO_LLMC),
    "large id": ("llmc", with_token(llama3, 128_000), "000000.bin has token id 128000, beyond the"),
    "megatron magic": ("megatron", written(write_megatron, magic=b"TNTIDX\0\0\0"), NO_INDEX),
    "int64": ("megatron", written(write_megatron, code=5), NO_INDEX),
    "short": ("megatron", written(write_megatron, lambda data: data[:-900], ".idx"), NO_INDEX),
    "header cut": ("megatron", written(write_megatron, lambda data: data[:20], ".idx"), NO_INDEX),
    "other bin": ("megatron", written(write_megatron, lambda data: data[:-2]), NO_INDEX),
    "other lengths": ("megatron", written(write_megatron, damage(34), ".idx"), NO_INDEX),
    "no index": (
        "megatron",
        lambda file: (write_megatron(file, TRAIN), file.with_suffix(".idx").unlink()),
        r"cannot read .*text_document.idx: No such file",
    ),
    "a pipe": (
        "megatron",
        lambda file: (
            write_megatron(file, TRAIN),
            file.with_suffix(".idx").unlink(),
            os.mkfifo(file.with_suffix(".idx")),  # whose opening would wait for its other end
        ),
        r"cannot read .*text_document.idx: Not a regular file",
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
    with pytest.raises(UserError, match=message):
        prepare_data(config)
    assert not (tmp_path / "shards").exists()


def test_a_folder_of_other_files_gets_no_manifest(tmp_path):
    config = config_of(tmp_path, "nanogpt:{}")
    write_nanogpt(tmp_path / "tokens" / "train.bin", TRAIN)
    folder = Path(config.data.path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "thesis.tex").touch()
    with pytest.raises(
        UserError, match="holds thesis.tex, but no manifest.json or plan.json: move"
    ):
        prepare_data(config)
    assert [file.name for file in folder.iterdir()] == ["thesis.tex"]


def test_a_link_may_lead_to_a_folder_that_is_not_there_yet(tmp_path):
    config = config_of(tmp_path, "nanogpt:{}")
    write_nanogpt(tmp_path / "tokens" / "train.bin", TRAIN)
    Path(config.data.path).symlink_to(tmp_path / "far" / "away")
    prepare_data(config)
    assert (tmp_path / "far" / "away" / "manifest.json").exists()


def test_nothing_found_other_dtypes_and_only_validation_are_told(tmp_path):
    config = config_of(tmp_path, "llmc:{}")
    message = r"data.source: '\S+tokens/\*.bin' names no llmc file: paths count from the folder .*"
    with pytest.raises(UserError, match=message + re.escape(os.getcwd())):
        prepare_data(config)
    write_llmc(tmp_path / "tokens" / "x_val_0.bin", TRAIN)
    with pytest.raises(UserError, match="tokens. finds no tokens to train on: name other files"):
        prepare_data(config)
    llama3(tmp_path / "tokens" / "x_train_0.bin", TRAIN)
    with pytest.raises(UserError, match="x_val_0.bin has uint16 tokens, .*x_train_0.bin uint32"):
        prepare_data(config)


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
@pytest.mark.parametrize("glob", ["", "/*", "/**/*"])
def test_names_tell_the_split_and_what_is_left_out_is_said(tmp_path, capsys, kind, glob):
    write, source, _ = FORMATS[kind]
    end = "_text_document.bin" if kind == "megatron" else ".bin"
    config = config_of(tmp_path, source + (glob and glob + end))
    for number, split in enumerate(["train", "val", "valid", "validation_1", "test"]):
        write(tmp_path / "tokens" / f"latest_{split}_0{end}", documents(3, number))
    (tmp_path / "tokens" / f".x_train_0{end}").write_bytes(b"hidden")
    splits = prepare_shards(config.data).splits
    for name, numbers in (("train", [0]), ("validation", [1, 2, 3])):
        texts = [text for number in numbers for text in documents(3, number)]
        assert splits[name].tokens == len(np.concatenate(texts))
    said = capsys.readouterr().out
    assert "left out 1 file whose names say neither train nor val (the first: " in said
    assert f"latest_test_0{end}): name" in said


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
def test_a_file_that_is_named_outright_is_trained_on(tmp_path, kind):
    (tmp_path / "test").mkdir()
    FORMATS[kind][0](tmp_path / "test" / "my_val.bin", TRAIN)
    config = config_of(tmp_path, f"{kind}:{tmp_path}/test/my_val.bin")
    splits = prepare_shards(config.data).splits
    assert sum(split.tokens for split in splits.values()) == len(np.concatenate(TRAIN))


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
def test_validation_files_validate_whatever_their_names(tmp_path, kind):
    write, source, _ = FORMATS[kind]
    folder, end = tmp_path / "tokens", "_text_document.bin" if kind == "megatron" else ".bin"
    files = [f"{folder}/held*", f"{folder}/x_train_2{end}"]
    config = config_of(tmp_path, source, validation_files=files)
    for number, name in enumerate(["x_train_1", "x_train_2", "held_out"]):
        write(folder / f"{name}{end}", documents(3, number))
    splits = prepare_shards(config.data).splits
    for name, shards in (("train", ["x_train_1"]), ("validation", ["held_out", "x_train_2"])):
        assert [shard.file for shard in splits[name].shards] == [
            str(folder / f"{each}{end}") for each in shards
        ]
    with pytest.raises(UserError, match="prepared with data.validation_files = .*, now it is"):
        prepare_shards(config_of(tmp_path, source).data)
    with pytest.raises(UserError, match="data.validation_files: 'none(.bin)?' names no .* file"):
        other = str(tmp_path / "other")
        prepare_shards(config_of(tmp_path, source, validation_files=["none"], path=other).data)
    with pytest.raises(UserError, match="data.validation_files has no meaning for"):
        config_of(tmp_path, "text:x.txt", validation_files=files)


def test_token_files_can_be_packed(tmp_path):
    config = config_of(tmp_path, "nanogpt:{}", packing="best_fit")
    write_nanogpt(tmp_path / "tokens" / "train.bin", TRAIN)
    data = prepare_data(config)
    windows = data.windows("train", 32)
    read = [windows.parts[0][number].tolist() for number in range(windows.lengths[0])]
    stream = data.parts[0].manifest.splits["train"].tokens
    assert len(read) == (stream - 1) // 32
    ends = sum(window.count(END) for window in (each[:-1] for each in read))
    assert ends > 40  # of 50 documents, as inputs
    pairs = set(map(tuple, expected_windows(TRAIN, 1)))
    assert all(pair in pairs for each in read for pair in zip(each, each[1:]) if END not in pair)
