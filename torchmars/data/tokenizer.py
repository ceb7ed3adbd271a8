"""The interface of tokenizers: text to token ids and back."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError

LARGEST_VOCABULARY = 10_000_000
VocabularySize = Annotated[int, Range(1, LARGEST_VOCABULARY)]
TokenDtype = Literal["uint16", "uint32"]
# Tokens that end a document in tokenizers that name none, likeliest first, and that begin one.
ENDS_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
BEGINS_OF_TEXT = (
    "<|startoftext|>",
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "[BOS]",
    "<｜begin▁of▁sentence｜>",
)


class Unencodable(UserError):
    """A text of which a tokenizer gives up."""


class Tokenizer(Protocol):
    """The interface of every tokenizer; tokenizers inherit from it.

    Special tokens are never read out of text. `sha256` is the checksum of the file that the
    tokenizer was read from, None for one that has a name. `begin_token` is the id that documents
    begin with, as data.begin_token says; None: with no more than the end of the one before.
    """

    name: str
    sha256: str | None
    begin_token: int | None = None

    @property
    def vocab_size(self) -> int:
        """The largest id and 1."""

    @property
    def end_of_text(self) -> int:
        """The id that ends a document."""

    @property
    def before(self) -> list[int]:
        """The ids that a model has seen before each text, and so before a prompt: mostly none."""
        return [] if self.begin_token is None else [self.begin_token]

    @property
    def begin(self) -> int:
        """The id that a text comes after if there is nothing before it."""
        return self.end_of_text if self.begin_token is None else self.begin_token

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a model's text."""
        return frozenset({self.end_of_text})

    @property
    def own_begin(self) -> int | None:
        """The id of the tokenizer's own token that begins a text; None if it has none.

        Raises `UserError` if it has several.
        """
        found = (self.number(name) for name in BEGINS_OF_TEXT)
        return next((number for number in found if number is not None), None)

    def number(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary; None if there is none."""

    def token_of(self, text: str) -> int | None:
        """Return the id of the token that a text names, or is; None if it is no single one."""
        if (number := self.number(text)) is not None:
            return number
        try:
            found: list[int] = self.encode_batch([text])[0].tolist()
        except Unencodable:
            return None
        return found[0] if len(found) == 1 and self.decode(found) == text else None

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without an end-of-text token.

        Their dtype is an unsigned one that holds `vocab_size`. One thread works: a corpus is
        tokenised by several processes. Raises `Unencodable` for whatever a text makes it raise.
        """

    def encode_measured(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a text, and how many of its bytes end with each of them.

        The bytes are those of the text itself in UTF-8. What a tokenizer drops is the next token's,
        and what follows the last token is that one's.
        """

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids.

        Ids without text, those of padding rows of the token table, give none.
        """

    def decoded_bytes(self, tokens: list[int]) -> int:
        """Return how many bytes of UTF-8 token ids decode to."""
        return len(self.decode(tokens).encode())

    def is_settled(self, tokens: list[int]) -> bool:
        """Return whether the text of token ids stays as it is, whatever tokens follow.

        A letter's first bytes, which decode to U+FFFD, are left to the caller.
        """
        return True


@contextlib.contextmanager
def package_errors(
    name: Path | str, what: str, kind: type[UserError] = UserError
) -> Iterator[None]:
    """Raise an error of a `kind`, that a tokenizer is or does `what`, where its package gives up.

    The packages raise anything, and for a panic of Rust not even an `Exception`.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        remedy = "leave it out" if kind is Unencodable else "name another file"
        raise kind(f"data.tokenizer: {name} {what} ({reason}): {remedy}") from None


def smallest_dtype(vocab_size: int) -> TokenDtype:
    """Return the dtype of the tokens of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"
