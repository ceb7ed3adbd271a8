"""Tokenizers: text to token ids and back."""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError

if TYPE_CHECKING:
    import tiktoken

VocabularySize = Annotated[int, Range(1, 10_000_000)]


class Tokenizer(Protocol):
    """What every tokenizer offers. `end_of_text` is the id that ends a document."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without an end-of-text token.

        Their dtype is an unsigned one that holds `vocab_size`.
        """

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids.

        Ids without text, those of padding rows of the token table, give none.
        """


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts
        ]

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken. The special token is never read out of text."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken  # takes a while, and not every run needs it

        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                "the gpt2 tokenizer needs its BPE files once from the network, or "
                f"TIKTOKEN_CACHE_DIR at a folder that has them ({type(error).__name__})"
            ) from None

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.array(tokens, dtype=np.uint16)
            for tokens in self._encoding.encode_ordinary_batch(texts, num_threads=1)
        ]

    def decode(self, tokens: list[int]) -> str:
        return self._encoding.decode([token for token in tokens if token < self.end_of_text])


TOKENIZERS: dict[str, type[Tokenizer]] = {
    kind.name: kind for kind in (ByteTokenizer, GPT2Tokenizer)
}


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that data.tokenizer names."""
    return TOKENIZERS[name]()
