"""Tokenizers: text to token ids and back."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError, missing_package
from torchmars.core.files import read_bytes, read_text, write_durably
from torchmars.core.typed import is_text, nearest, parse_json

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

LARGEST_VOCABULARY = 10_000_000
VocabularySize = Annotated[int, Range(1, LARGEST_VOCABULARY)]
TokenDtype = Literal["uint16", "uint32"]
# Vocabulary and end of text of an encoding that needs no BPE files where no text is read.
KNOWN = {"gpt2": (50257, 50256)}
# What ends a document in tokenizers that do not say it, likeliest first.
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

# The id of each token that is not special: of two pairs, the lower one is merged first. Then the
# regular expression of the pieces of text that are encoded apart, if any are, and the ids of
# special tokens.
BytePairs = tuple[dict[bytes, int], str | None, dict[str, int]]


class Unencodable(UserError):
    """A text of which a tokenizer gives up."""


class Tokenizer(Protocol):
    """What every tokenizer offers.

    Special tokens are never read out of text. `sha256` is that of the file that the tokenizer was
    read from, None for one that has a name.
    """

    name: str
    sha256: str | None

    @property
    def vocab_size(self) -> int:
        """The largest id and 1."""

    @property
    def end_of_text(self) -> int:
        """The id that ends a document."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without an end-of-text token.

        Their dtype is an unsigned one that holds `vocab_size`. One thread works: a corpus is
        tokenised by several processes. Raises `Unencodable` for whatever a text makes it raise.
        """

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids.

        Ids without text, those of padding rows of the token table, give none.
        """


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a document."""

    name = "bytes"
    sha256: str | None = None
    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with refused(self.name, "cannot encode a text", Unencodable):
            encoded = [text.encode("utf-8") for text in texts]
        return [np.frombuffer(each, dtype=np.uint8).astype(np.uint16) for each in encoded]

    def byte_pairs(self) -> BytePairs:
        """Return each byte as a token: nothing is merged, and nothing is encoded apart."""
        ranks = {bytes([byte]): byte for byte in range(256)}
        return ranks, None, {ENDS_OF_TEXT[0]: self.end_of_text}

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class TiktokenTokenizer:
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

    def byte_pairs(self) -> BytePairs:
        """Return what tiktoken keeps to itself, under the same names since its first version."""
        found = self._encoding
        return found._mergeable_ranks, found._pat_str, found._special_tokens

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        with refused(self.name, "cannot encode a text", Unencodable):
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

    def decode(self, tokens: list[int]) -> str:
        parts = []
        for token in tokens:
            with contextlib.suppress(KeyError):  # an id without text
                if not self._encoding.is_special_token(token):
                    parts.append(self._encoding.decode_single_token_bytes(token))
        return b"".join(parts).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of Hugging Face, by the path of its tokenizer.json or of the folder with it."""

    def __init__(self, name: str) -> None:
        """Raises `UserError` if there is no such file."""
        self.name = name
        path = Path(os.path.expanduser(name))
        self.path = path / "tokenizer.json" if os.path.isdir(path) else path
        try:
            self._content = read_bytes(self.path)
        except OSError as error:
            raise UserError(
                f"data.tokenizer: cannot read {self.path}: {error.strerror}: "
                "name a tokenizer.json, or the folder that has it"
            ) from None
        self.sha256: str | None = hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        try:
            import tokenizers
        except ImportError:
            raise missing_package("tokenizers", f"the tokenizer {self.path}") from None
        with refused(self.path, "is no tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self._content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # as the text that they are
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if last >= LARGEST_VOCABULARY:
            raise UserError(
                f"data.tokenizer: {self.path} has a token of id {last:,}, {LARGEST_VOCABULARY:,} "
                "tokens are possible: name another file"
            )
        return last + 1

    @property
    def text(self) -> str:
        """The content of the tokenizer.json."""
        return self._content.decode()

    def token(self, number: int) -> str:
        """Return the token of an id that there is."""
        return str(self._tokenizer.id_to_token(number))

    @cached_property
    def end_of_text(self) -> int:
        named = self.settings.get("eos_token")
        if isinstance(named, dict):
            named = named.get("content")
        tokens = [named] if isinstance(named, str) else ENDS_OF_TEXT
        for token in tokens:
            if is_text(token) and (number := self._tokenizer.token_to_id(token)) is not None:
                return number
        raise UserError(
            f"data.tokenizer: {self.path} has none of the tokens that end a text "
            f"({', '.join(tokens)}): put a tokenizer_config.json with its "
            "eos_token beside it"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the tokenizer_config.json beside the file says; nothing if there is none.

        Raises `UserError` if it is damaged.
        """
        file = self.path.with_name("tokenizer_config.json")
        try:
            return parse_json(read_text(file)) if os.path.lexists(file) else {}
        except (OSError, ValueError) as error:
            raise UserError(f"data.tokenizer: cannot read {file} ({error}): restore it") from None

    def copy_to(self, folder: Path) -> None:
        """Leave all that the tokenizer is read from in a folder. Raises `OSError`."""
        folder.mkdir(exist_ok=True)
        write_durably(folder / "tokenizer_config.json", json.dumps(self.settings, indent=2) + "\n")
        write_durably(folder / "tokenizer.json", self.text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        # Not its encode_batch, which takes all cores.
        with refused(self.path, "cannot encode a text", Unencodable):
            found = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
            return [np.array(each.ids, dtype=dtype) for each in found]

    def decode(self, tokens: list[int]) -> str:
        with refused(self.path, "cannot decode tokens"):
            return self._tokenizer.decode(tokens, skip_special_tokens=True)


@contextlib.contextmanager
def refused(name: Path | str, what: str, kind: type[UserError] = UserError) -> Iterator[None]:
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


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that data.tokenizer names. Raises `UserError` if there is none.

    What it needs is read only when it is asked for.
    """
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
        f"data.tokenizer: there is none called {name!r}: did you mean {nearest(name, known)}? "
        f"It is one of {', '.join(known)}, or the path of a tokenizer.json"
    )
