"""From text to token ids and back: by bytes, an encoding of tiktoken, or a tokenizer.json."""

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np

from torchmars.core.check import Interval, is_text, meant, parse_json
from torchmars.core.console import say
from torchmars.core.errors import UserError, file_errors, needs_package
from torchmars.core.files import read_bytes, read_text, write_durably

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

VocabularySize = Annotated[int, Interval(1, 10_000_000)]
TokenDtype = Literal["uint16", "uint32"]
# Tokens that end a document in tokenizers that name none, likeliest first.
ENDS_OF_TEXT = "<|endoftext|> <|end_of_text|> </s> <eos> [EOS] <｜end▁of▁sentence｜>".split()
# Vocabulary and end of text of an encoding that needs no BPE files where no text is read.
KNOWN = {"gpt2": (50257, 50256)}
# The files of a model that name the ends of its texts. The first that does counts.
GENERATION = "generation_config.json"
NAMING_ENDS = (GENERATION, "config.json")


class Unencodable(UserError):
    """A text of which a tokenizer gives up."""


class Tokenizer(Protocol):
    """The interface of every tokenizer; tokenizers inherit from it.

    Special tokens are never read out of text. `sha256` is the checksum of the file that the
    tokenizer was read from, None for one that has a name. `begin_token` is the id that documents
    begin with, as data.begin_token says; None: with no more than the end of the one before.
    """

    name: str
    sha256: str | None = None
    begin_token: int | None = None

    @property
    def vocab_size(self) -> int:
        """The largest id and 1."""

    @property
    def end_of_text(self) -> int:
        """The id that ends a document."""

    @property
    def put_before(self) -> list[int]:
        """The ids that the tokenizer's own template puts before a text."""
        return []

    @property
    def before(self) -> list[int]:
        """The ids that a model has seen before each text, and so before a prompt: mostly none."""
        return [] if self.begin_token is None else [self.begin_token]

    @property
    def begin(self) -> int:
        """The id that a text comes after if there is nothing before it."""
        return self.end_of_text if self.begin_token is None else self.begin_token

    @property
    def ends(self) -> list[int]:
        """The ids that end a model's text, first the one that ends a document."""
        return [self.end_of_text]

    def number(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary; None if there is none."""

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, without an end-of-text token.

        Their dtype is an unsigned one that holds `vocab_size`. One thread works: a corpus is
        tokenised by several processes. Raises `Unencodable` for whatever a text makes it raise.
        """

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids.

        Ids without text, those of padding rows of the token table, give none.
        """


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and one that ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def number(self, token: str) -> int | None:
        if token == ENDS_OF_TEXT[0]:
            return self.end_of_text
        content = token.encode(errors="surrogatepass")
        return content[0] if len(content) == 1 else None

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode(self, text: str) -> np.ndarray:
        with package_errors("bytes cannot encode a text"):
            content = text.encode()
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)


class TiktokenTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken, by its name there."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        """tiktoken's own, of which its files are read. Raises `UserError`."""
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
        return KNOWN[self.name][0] if self.name in KNOWN else self.encoding.n_vocab

    @property
    def end_of_text(self) -> int:
        return KNOWN[self.name][1] if self.name in KNOWN else self.encoding.eot_token

    def number(self, token: str) -> int | None:
        with contextlib.suppress(KeyError, UnicodeEncodeError):
            return self.encoding.encode_single_token(token)
        return None

    def decode(self, tokens: list[int]) -> str:
        parts = []
        for token in tokens:
            with contextlib.suppress(KeyError):  # an id without text
                if not self.encoding.is_special_token(token):
                    parts.append(self.encoding.decode_single_token_bytes(token))
        return b"".join(parts).decode(errors="replace")

    def encode(self, text: str) -> np.ndarray:
        # `encode_to_numpy` spares a list of Python's numbers, a fifth of the time. But it reads
        # special tokens out of a text, and refuses half of a surrogate pair. `encode_ordinary` is
        # not called: where it gives up, it prints a traceback.
        with package_errors(f"{self.name} cannot encode a text"):
            special = any(token in text for token in self.encoding.special_tokens_set)
            if special or not text or not is_text(text):
                found = np.array(self.encoding.encode(text, disallowed_special=()))
            else:
                found = self.encoding.encode_to_numpy(text, disallowed_special=())
        return found.astype(smallest_dtype(self.vocab_size))


class FileTokenizer(Tokenizer):
    """A tokenizer of Hugging Face, by the path of its tokenizer.json or of the folder with it."""

    def __init__(self, name: str) -> None:
        """Raises `UserError` if there is no such file."""
        self.name = name
        path = Path(os.path.expanduser(name))
        self.path = path / "tokenizer.json" if os.path.isdir(path) else path
        remedy = "name a tokenizer.json, or the folder that has it"
        with file_errors(f"data.tokenizer: cannot read {self.path}", remedy):
            self.content = read_bytes(self.path)
        self.sha256: str | None = hashlib.sha256(self.content).hexdigest()

    @property
    def package_tokenizer(self) -> "tokenizers.Tokenizer":
        """The one of the package tokenizers. Raises `UserError` if the file is no tokenizer."""
        return parsed(self.path, self.content)

    @cached_property
    def vocab_size(self) -> int:
        return 1 + max(self.package_tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def end_of_text(self) -> int:
        named = self.named("eos_token")
        tokens = ENDS_OF_TEXT if named is None else [named]
        found = [number for each in tokens if (number := self.number(each)) is not None]
        if not found:
            raise UserError(
                f"data.tokenizer: {self.path} has none of the tokens that end a text "
                f"({', '.join(tokens)}): put a tokenizer_config.json with its eos_token beside it"
            )
        return found[0]

    @cached_property
    def put_before(self) -> list[int]:
        own = self.package_tokenizer
        # Around the token of another one, so that no text and no vocabulary plays a part.
        one = own.from_str('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
        whole = own.post_process(one.encode("a"), None, True)
        return whole.ids[: [*whole.special_tokens_mask, 0].index(0)]

    def number(self, token: str) -> int | None:
        return self.package_tokenizer.token_to_id(token) if is_text(token) else None

    def named(self, setting: str) -> str | None:
        """Return the token that a setting names, as a text or as a table; None if it names none."""
        found = self.settings.get(setting)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None

    @property
    def settings(self) -> dict[str, Any]:
        """The contents of the tokenizer_config.json beside the file, as of a `table`."""
        return self.table("tokenizer_config.json")

    def table(self, name: str) -> dict[str, Any]:
        """Return the contents of a file of JSON beside this one; nothing if there is none.

        Raises `UserError` if it is damaged.
        """
        file = self.path.with_name(name)
        try:
            return parse_json(read_text(file)) if os.path.lexists(file) else {}
        except (OSError, ValueError) as error:
            raise UserError(f"data.tokenizer: cannot read {file} ({error}): restore it") from None

    @cached_property
    def ends(self) -> list[int]:
        """The end token of documents here, and the end tokens of the model a run started from."""
        return [*dict.fromkeys([self.end_of_text, *self.ends_of_model])]

    @cached_property
    def ends_of_model(self) -> list[int]:
        """The ids that end a text by what the model says that lies beside the file; mostly none."""
        for name in NAMING_ENDS:
            found = self.table(name).get("eos_token_id")
            ends = found if isinstance(found, list) else [] if found is None else [found]
            if ends:
                return ends
        return []

    def copy_to(self, folder: Path) -> None:
        """Leave all that the tokenizer is read from in a folder. Raises `OSError`."""
        folder.mkdir(exist_ok=True)
        if ends := self.ends_of_model:
            write_durably(folder / GENERATION, json.dumps({"eos_token_id": ends}) + "\n")
        write_durably(folder / "tokenizer_config.json", json.dumps(self.settings, indent=2) + "\n")
        write_durably(folder / "tokenizer.json", self.content)

    def encode(self, text: str) -> np.ndarray:
        with package_errors(f"{self.path} cannot encode a text"):
            found = self.package_tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=smallest_dtype(self.vocab_size))

    def decode(self, tokens: list[int]) -> str:
        return self.package_tokenizer.decode(tokens, skip_special_tokens=True)


@lru_cache(maxsize=4)  # a run asks for its tokenizer in several places
def parsed(path: Path, content: bytes) -> "tokenizers.Tokenizer":
    """Return the tokenizer of a tokenizer.json. Raises `UserError`."""
    with needs_package("tokenizers", f"the tokenizer {path}"):
        import tokenizers
    with package_errors(f"{path} is no tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # each text would have other tokens each time
        # Not in the processes that tokenise nor, after their launcher, in ranks.
        if multiprocessing.parent_process() is None and "RANK" not in os.environ:
            say(f"data.tokenizer: texts are encoded without the dropout of {path}", error=True)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # as the text that they are
    return tokenizer


def load_tokenizer(name: str, begin_token: str = "none") -> Tokenizer:
    """Return the tokenizer that data.tokenizer names, and documents begin as `begin_token` says.

    That is data.begin_token. Raises `UserError` if there is no such tokenizer or token. Its files
    are read only when they are needed.
    """
    tokenizer = find_tokenizer(name)
    if begin_token == "none":
        return tokenizer
    found = tokenizer.put_before if begin_token == "auto" else [tokenizer.number(begin_token)]
    if len(found) > 1 or None in found:
        raise UserError(
            f"data.begin_token: {json.dumps(begin_token, ensure_ascii=False)} is no single token "
            f"of data.tokenizer = {json.dumps(name)}: name a token of its vocabulary, auto or none"
        )
    # Documents that begin with the token that ends them have it before them as it is.
    tokenizer.begin_token = next((each for each in found if each != tokenizer.end_of_text), None)
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
    otherwise = f"it is one of {', '.join(known)}, or the path of a tokenizer.json"
    raise UserError(
        f"data.tokenizer: there is none called {name!r}: {meant(name, known, otherwise)}"
    )


@contextlib.contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Raise `Unencodable`, which says `what`, where a tokenizer's package gives up.

    The packages raise anything, and for a panic of Rust not even an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not isinstance(error, Exception) and not panic:
            raise
        raise Unencodable(f"data.tokenizer: {what} ({error})") from None


def smallest_dtype(vocab_size: int) -> TokenDtype:
    """Return the dtype of the tokens of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"
