"""Tokenizers that have a name: bytes, and tiktoken's; and the one that data.tokenizer names."""

import contextlib
import json
import os
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torchmars.core.errors import UserError
from torchmars.core.typed import is_text, meant
from torchmars.data.tokenizer import (
    ENDS_OF_TEXT,
    Tokenizer,
    Unencodable,
    package_errors,
    smallest_dtype,
)
from torchmars.data.tokenizer_file import FileTokenizer

if TYPE_CHECKING:
    import tiktoken

# Vocabulary and end of text of an encoding that needs no BPE files where no text is read.
KNOWN = {"gpt2": (50257, 50256)}

# The id of each token that is not special: of two pairs, the lower one is merged first. Then the
# regular expression of the pieces of text that are encoded apart, if any are, and the ids of
# special tokens.
BytePairs = tuple[dict[bytes, int], str | None, dict[str, int]]


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and one that ends a document."""

    name = "bytes"
    sha256: str | None = None
    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with package_errors(self.name, "cannot encode a text", Unencodable):
            encoded = [text.encode("utf-8") for text in texts]
        return [np.frombuffer(each, dtype=np.uint8).astype(np.uint16) for each in encoded]

    def encode_measured(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.encode_batch([text])[0]
        return tokens, np.arange(1, len(tokens) + 1)

    def number(self, token: str) -> int | None:
        return self.byte_pairs()[2].get(token)

    def byte_pairs(self) -> BytePairs:
        """Return each byte as a token: nothing is merged, and nothing is encoded apart."""
        ranks = {bytes([byte]): byte for byte in range(256)}
        return ranks, None, {ENDS_OF_TEXT[0]: self.end_of_text}

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def decoded_bytes(self, tokens: list[int]) -> int:
        return sum(token < 256 for token in tokens)


class TiktokenTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken, by its name there."""

    sha256: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken  # takes a while, and not every run needs it

        try:
            return tiktoken.get_encoding(self.name)
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                f"the {self.name} tokenizer needs its BPE files once from the network, or "
                f"TIKTOKEN_CACHE_DIR at a folder that has them ({type(error).__name__})"
            ) from None

    @property
    def vocab_size(self) -> int:
        return KNOWN[self.name][0] if self.name in KNOWN else self._encoding.n_vocab

    @property
    def end_of_text(self) -> int:
        return KNOWN[self.name][1] if self.name in KNOWN else self._encoding.eot_token

    def number(self, token: str) -> int | None:
        return self.byte_pairs()[2].get(token)

    def byte_pairs(self) -> BytePairs:
        """Return private parts of tiktoken, which had the same names since its first version."""
        found = self._encoding
        return found._mergeable_ranks, found._pat_str, found._special_tokens

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        with package_errors(self.name, "cannot encode a text", Unencodable):
            return [self._encode(text).astype(dtype) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text.

        `encode_to_numpy` spares a list of Python's numbers, a fifth of the time. But it reads
        special tokens out of a text, and refuses half of a surrogate pair. `encode_ordinary` is not
        called: where it gives up, it prints a traceback.
        """
        special = any(token in text for token in self._encoding.special_tokens_set)
        if special or not text or not is_text(text):
            found = self._encoding.encode(text, disallowed_special=())
            return np.array(found, dtype=np.uint32)
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def encode_measured(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.encode_batch([text])[0]
        sizes = [len(self._encoding.decode_single_token_bytes(int(token))) for token in tokens]
        return tokens, np.cumsum(sizes, dtype=np.int64)

    def decode(self, tokens: list[int]) -> str:
        return self._bytes(tokens).decode("utf-8", errors="replace")

    def decoded_bytes(self, tokens: list[int]) -> int:
        return len(self._bytes(tokens))

    def _bytes(self, tokens: list[int]) -> bytes:
        """Return the bytes of token ids, which may begin or end within a letter."""
        parts = []
        for token in tokens:
            with contextlib.suppress(KeyError):  # an id without text
                if not self._encoding.is_special_token(token):
                    parts.append(self._encoding.decode_single_token_bytes(token))
        return b"".join(parts)


def load_tokenizer(name: str, begin_token: str = "none") -> Tokenizer:
    """Return the tokenizer that data.tokenizer names, and documents begin as `begin_token` says.

    That is data.begin_token. Raises `UserError` if there is no such tokenizer or token. Its files
    are read only when they are needed.
    """
    tokenizer = find_tokenizer(name)
    if begin_token == "none":
        return tokenizer
    number = tokenizer.own_begin if begin_token == "auto" else tokenizer.token_of(begin_token)
    if number is None and begin_token != "auto":
        raise UserError(
            f"data.begin_token: {json.dumps(begin_token, ensure_ascii=False)} is no single token "
            f"of data.tokenizer = {json.dumps(name)}: name a token of its vocabulary, auto or none"
        )
    # Documents that begin with the token that ends them have it before them as it is.
    tokenizer.begin_token = None if number == tokenizer.end_of_text else number
    return tokenizer


def find_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a name or a path. Raises `UserError` if there is none."""
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name in KNOWN:
        return TiktokenTokenizer(name)
    if "/" in name or name.endswith(".json"):
        return FileTokenizer(name)
    import tiktoken

    known = [ByteTokenizer.name, *tiktoken.list_encoding_names()]
    if name in known:
        return TiktokenTokenizer(name)
    if os.path.exists(name):
        return FileTokenizer(name)
    raise UserError(
        f"data.tokenizer: there is none called {name!r}: "
        + meant(name, known, f"it is one of {', '.join(known)}, or the path of a tokenizer.json")
    )
