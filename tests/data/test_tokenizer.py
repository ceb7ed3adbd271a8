"""Tokens of known texts, and round trips."""

import shutil

import pytest

from tests.support.real_data import FOLDER, needs_data
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import ByteTokenizer, TiktokenTokenizer


def test_bytes():
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode_batch(["aé\n"])
    assert tokens.tolist() == [97, 195, 169, 10]
    assert tokenizer.decode(tokens.tolist() + [256, 300]) == "aé\n"


@needs_data("tiktoken_cache")
def test_gpt2_known_ids(tmp_path, monkeypatch):
    shutil.copytree(
        FOLDER / "tiktoken_cache", tmp_path / "bpe"
    )  # tiktoken may delete from its cache
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))
    tokenizer = TiktokenTokenizer("gpt2")
    texts = ["Hello world", "Hello, world!", "The quick brown fox jumps over the lazy dog"]
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(texts)] == [
        [15496, 995],
        [15496, 11, 995, 0],
        [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
    ]
    assert [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode_batch(texts)] == texts
    assert 50256 not in tokenizer.encode_batch(["<|endoftext|>"])[0]


def test_gpt2_without_its_files_says_what_to_do(tmp_path, monkeypatch):
    import tiktoken

    def unreachable(name):
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        TiktokenTokenizer("gpt2").encode_batch(["a"])
