"""A tokenizer of Hugging Face in a file, tokenizer.json, and the files beside it."""

import contextlib
import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchmars.core.errors import UserError, file_errors, needs_package
from torchmars.core.files import read_bytes, read_text, write_durably
from torchmars.core.typed import is_text, parse_json
from torchmars.data.tokenizer import (
    ENDS_OF_TEXT,
    LARGEST_VOCABULARY,
    Tokenizer,
    Unencodable,
    package_errors,
    smallest_dtype,
)

if TYPE_CHECKING:
    import tokenizers

GENERATION = "generation_config.json"
# The files that name the end of a text. The first that does counts.
NAMING_ENDS = (GENERATION, "config.json")


class FileTokenizer(Tokenizer):
    """A tokenizer of Hugging Face, by the path of its tokenizer.json or of the folder with it."""

    def __init__(self, name: str) -> None:
        """Raises `UserError` if there is no such file."""
        self.name = name
        path = Path(os.path.expanduser(name))
        self.path = path / "tokenizer.json" if os.path.isdir(path) else path
        remedy = "name a tokenizer.json, or the folder that has it"
        with file_errors(f"data.tokenizer: cannot read {self.path}", remedy):
            self._content = read_bytes(self.path)
        self.sha256: str | None = hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        with needs_package("tokenizers", f"the tokenizer {self.path}"):
            import tokenizers
        with package_errors(self.path, "is no tokenizer.json"):
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
        named = self.named("eos_token")
        tokens = ENDS_OF_TEXT if named is None else [named]
        for token in tokens:
            if (number := self.number(token)) is not None:
                return number
        raise UserError(
            f"data.tokenizer: {self.path} has none of the tokens that end a text "
            f"({', '.join(tokens)}): put a tokenizer_config.json with its "
            "eos_token beside it"
        )

    @property
    def own_begin(self) -> int | None:
        """What the post-processor puts before a text; else the bos_token of the
        tokenizer_config.json, unless its add_bos_token is false; without that file one of the
        usual names."""
        if len(self.put_before) > 1:
            names = " ".join(map(self.token, self.put_before))
            raise UserError(
                f"data.begin_token: {self.path} puts several tokens before a text ({names}): name "
                "one of them, or none"
            )
        if self.put_before:
            return self.put_before[0]
        if not self.settings:
            return super().own_begin
        named = self.named("bos_token")
        if named is None or self.settings.get("add_bos_token") is False:
            return None
        return self.number(named)

    @cached_property
    def put_before(self) -> list[int]:
        """The ids that the post-processor puts before a text. Tokens after one are left out."""
        from tokenizers import Tokenizer, models

        # A token of another tokenizer, so that no text and no vocabulary plays a part.
        any_token = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
        whole = self._tokenizer.post_process(any_token, None, True)
        mask = whole.special_tokens_mask
        return whole.ids[: mask.index(0)] if 0 in mask else whole.ids

    def number(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token) if is_text(token) else None

    def named(self, setting: str) -> str | None:
        """Return the token that a setting names, as a text or as a table; None if it names none."""
        found = self.settings.get(setting)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None

    @property
    def settings(self) -> dict[str, Any]:
        """The contents of the tokenizer_config.json beside the file; nothing if there is none.

        Raises `UserError` if it is damaged.
        """
        try:
            return self.table("tokenizer_config.json")
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}") from None

    def table(self, name: str) -> dict[str, Any]:
        """Return the contents of a file of JSON beside this one; nothing if there is none.

        Raises `UserError` if it is damaged.
        """
        file = self.path.with_name(name)
        try:
            return parse_json(read_text(file)) if os.path.lexists(file) else {}
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {file} ({error}): restore it") from None

    @property
    def around(self) -> list[int]:
        """The ids that the file's post-processor puts around a text."""
        with package_errors(self.path, "cannot encode a text"):
            found = self._tokenizer.encode("")
        return [number for number, mask in zip(found.ids, found.special_tokens_mask) if mask]

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end token of documents here, and the end tokens of the model a run started from."""
        return frozenset({self.end_of_text, *self.ends_of_model})

    @cached_property
    def ends_of_model(self) -> list[int]:
        """The ids that end a text by what the model says that lies beside the file; mostly none."""
        for name in NAMING_ENDS:
            with contextlib.suppress(UserError):
                if ends := self.ends_in(name):
                    return ends
        return []

    def ends_in(self, name: str) -> list[int]:
        """Return the ids that end a text by a file of the model beside this one; mostly none.

        Raises `UserError` for a file that names no token ids.
        """
        found = self.table(name).get("eos_token_id")
        ends = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(number) is int and number >= 0 for number in ends):
            file = self.path.with_name(name)
            raise UserError(f"{file}: eos_token_id is {found!r}, no token id: correct it")
        return ends

    def copy_to(self, folder: Path) -> None:
        """Leave all that the tokenizer is read from in a folder. Raises `OSError`."""
        folder.mkdir(exist_ok=True)
        if ends := self.ends_of_model:
            write_durably(folder / GENERATION, json.dumps({"eos_token_id": ends}) + "\n")
        write_durably(folder / "tokenizer_config.json", json.dumps(self.settings, indent=2) + "\n")
        write_durably(folder / "tokenizer.json", self.text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        # Not its encode_batch, which takes all cores.
        with package_errors(self.path, "cannot encode a text", Unencodable):
            found = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
            return [np.array(each.ids, dtype=dtype) for each in found]

    def encode_measured(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with package_errors(self.path, "cannot encode a text"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(found.ids, dtype=smallest_dtype(self.vocab_size))
        # The package counts letters of the text, whatever it has made of them.
        letters = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + (letters > 0x7F) + (letters > 0x7FF) + (letters > 0xFFFF).astype(np.int64)
        after = np.concatenate([[0], np.cumsum(sizes)])
        ends = np.maximum.accumulate(after[[end for _, end in found.offsets]])
        ends[-1:] = after[-1]
        return tokens, ends

    def decode(self, tokens: list[int]) -> str:
        with package_errors(self.path, "cannot decode tokens"):
            return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def is_settled(self, tokens: list[int]) -> bool:
        """Return False after a token that stands for a byte: one that is no part of a letter makes
        all of those before it unknown, up to the last one that is no byte."""
        last = next((token for token in reversed(tokens) if token not in self._special), None)
        return last not in self._bytes

    @cached_property
    def _special(self) -> frozenset[int]:
        """The ids that have no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _bytes(self) -> frozenset[int | None]:
        """The ids that stand for a byte, as sentencepiece names them."""
        return frozenset(self.number(f"<0x{byte:02X}>") for byte in range(256)) - {None}
