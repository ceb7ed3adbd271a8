"""Files of tokens without a header that are not what nanoGPT writes, written here by NumPy."""

import io
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.full import full_but
from tests.support.tiny import tiny_config
from tests.support.token_files import write_llmc
from tests.support.tokenizers import tokenizer_file
from torchmars.core.errors import LONGEST, UserError
from torchmars.data.headerless import LOOKED_AT, check_numbers
from torchmars.data.manifest import read_manifest
from torchmars.data.prepare import prepare_shards
from torchmars.data.shards import check_shards

TOKENS = np.random.default_rng(0).integers(0, 257, 3000)


def prepared(folder, source="nanogpt:{}", **data):
    data = {"source": source.format(folder), "files": [], "path": str(folder / "shards")} | data
    config = tiny_config(folder, data=data).data
    return prepare_shards(config), Path(config.path)


def tokens_of(manifest):
    """The tokens of both splits, as NumPy reads them in the files that the manifest names."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    dtype = {"uint16": "<u2", "uint32": "<u4"}[manifest.dtype]
    parts = [
        np.fromfile(shard.file, dtype, shard.tokens, offset=shard.offset)
        for shard in sorted(shards, key=lambda shard: shard.offset)
    ]
    return np.concatenate(parts)


WIDE = {
    "uint32": ("<u4", "has uint32 tokens"),
    "int32": ("<i4", "has uint32 tokens"),
    "int64": ("<i8", "has int64 tokens"),
    "uint32 big-endian": (">u4", "has uint32 tokens"),
    "int64 big-endian": (">i8", "has int64 tokens"),
    "uint16 big-endian": (">u2", "has big-endian tokens"),
}


@pytest.mark.parametrize("kind", full_but(["uint32", "int64", "uint16 big-endian"], WIDE))
def test_other_numbers_are_refused_with_the_line_that_makes_them_readable(tmp_path, kind):
    dtype, message = WIDE[kind]
    folder = tmp_path / "with a space"
    folder.mkdir()
    TOKENS.astype(dtype).tofile(folder / "train.bin")
    with pytest.raises(UserError, match=message) as mistake:
        prepared(folder)
    line = str(mistake.value)
    assert "\n" not in line and len(line) < LONGEST and not (folder / "shards").exists()
    source, _, command = line.partition("set data.source to ")[2].partition(" after this")
    command = command.partition(": ")[2].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(command, shell=True, check=True)
    manifest, shards = prepared(folder, source)
    assert tokens_of(manifest).tolist() == TOKENS.tolist()
    check_shards(read_manifest(shards), shards)


def test_a_vocabulary_beyond_16_bits_and_tokens_of_it(tmp_path):
    """Ids of GPT-4's and Llama 3's size: no uint16 says so by itself."""
    file = tokenizer_file(tmp_path / "large", letter_id=lambda letter: 1000 * ord(letter))
    ids = np.random.default_rng(1).integers(0, 126_000, 3000)
    ids.astype("<u4").tofile(tmp_path / "train.bin")
    for tokenizer in (str(file), "bytes"):
        with pytest.raises(
            UserError, match="has uint32 tokens, no uint16: set data.source to llmc"
        ):
            prepared(tmp_path, tokenizer=tokenizer)
    (ids % 60_000).astype("<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="is read as uint16, .* has 126,002 tokens: .*python -c"):
        prepared(tmp_path, tokenizer=str(file))
    write_llmc(tmp_path / "x_train_0.bin", [ids % 60_000])
    with pytest.raises(UserError, match="has uint16 tokens, and data.tokenizer = .* has 126,002"):
        prepared(tmp_path, "llmc:{}/x*", tokenizer=str(file))


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def with_header(tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + tokens.astype("<u2").tobytes()


OTHERS = {
    "npy": (npy(TOKENS.astype("<u2")), "train.bin is NumPy's .npy: set data.source to llmc:"),
    "llm.c": (with_header(TOKENS), "train.bin has llm.c's header: set data.source to llmc:"),
    "text": ("Wörter und mehr Wörter. ".encode() * 99, "is text, or has one byte a token: .*text:"),
    "odd": (TOKENS.astype("<u2").tobytes()[:-1], "which are no uint16 tokens"),
    "empty": (b"", "has 0 bytes"),
    "vocabulary": (np.full(99, 257, "<u2").tobytes(), "token id 257, beyond the 257 of"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_files_of_other_programs_are_refused(tmp_path, kind, name):
    content, message = OTHERS[kind]
    TOKENS.astype("<u2").tofile(tmp_path / "train.bin")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message.replace("train.bin", name)) as mistake:
        prepared(tmp_path)
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        TOKENS % 4,  # an alphabet of four
        TOKENS % 2,
        np.zeros(3000, int),
        np.repeat([0, 7, 1], 1000),  # every second number is small, for long
        np.array([9, 1]),
        np.array([9, 1, 8, 2]),
    ],
)
def test_tokens_of_16_bits_are_read_whatever_they_are(tmp_path, tokens):
    tokens.astype("<u2").tofile(tmp_path / "train.bin")
    manifest, _ = prepared(tmp_path)
    assert tokens_of(manifest).tolist() == tokens.tolist()


def test_numbers_of_characters_are_refused_and_their_file_is_not_read(tmp_path):
    """As nanoGPT's data/shakespeare_char/prepare.py leaves them."""
    (TOKENS % 65).astype("<u2").tofile(tmp_path / "train.bin")
    ran = tmp_path / "ran"
    (tmp_path / "meta.pkl").write_bytes(f"cos\nmkdir\n(V{ran}\ntR.".encode())
    for tokenizer in ("bytes", "gpt2", "p50k_base"):
        with pytest.raises(UserError, match="meta.pkl says that train.bin has nanoGPT's numbers"):
            prepared(tmp_path, tokenizer=tokenizer)
    assert not ran.exists()
    file = tokenizer_file(tmp_path / "own")  # made for these characters
    prepared(tmp_path, tokenizer=str(file))
    assert not ran.exists()


def test_a_header_and_a_few_large_numbers_hide_no_wide_ones(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 50_000, 200_000).astype("<u4")
    for name, content in (
        ("header", b"\xff" * 1024 + numbers.tobytes()),
        ("large", np.where(np.arange(200_000) % 500 == 7, 10**6, numbers).astype("<u4").tobytes()),
    ):
        file = tmp_path / f"{name}.bin"
        file.write_bytes(content)
        with pytest.raises(UserError, match="has uint32 tokens, no uint16"):
            check_numbers(file, content[:LOOKED_AT], len(content))


def test_uint16_tokens_with_one_blank_byte_are_no_text(tmp_path):
    content = np.array([32] + [100] * 40, "<u2").tobytes()
    check_numbers(tmp_path / "train.bin", content, len(content))
