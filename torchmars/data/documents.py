"""From blocks of raw text to tokens: the work of the processes that tokenise.

A process imports this file and a tokenizer, and nothing heavy.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from torchmars.data.tokenizer import Tokenizer, Unencodable, load_tokenizer

SEPARATOR = b"<|endoftext|>"  # alone on a line, it ends a document of a text file
Position = tuple[int, int, int]
"""Number of an input of a piece, offset in it (bytes, or rows of a table), and lines before it."""


@dataclass
class TextPart:
    """Consecutive documents of one input, as they were read, and where the next ones begin."""

    file: str
    content: "bytes | list[Record]"
    """Text, lines of JSON, or the values of rows. Where it cannot be read, why is its last one."""
    first: int
    """Number of the first line or row, from 0, or the offset of the first byte."""
    unit: str = "line"
    """The unit of `first`: line, byte or row."""
    offset: int = 0
    """Where the next part begins."""
    lines: int = 0
    """Lines before that."""
    read: int = 0
    """Bytes of the input that were read up to there."""
    last: bool = False
    """Whether nothing of the input is left."""

    @property
    def size(self) -> int:
        """Bytes or characters of its content, and one for each row."""
        if isinstance(self.content, bytes):
            return len(self.content)
        sizes = (len(each) for each in self.content if isinstance(each, (bytes, str)))
        return sum(sizes) + len(self.content)


@dataclass
class TextBlock:
    """Parts that are tokenised at once, and where the next block begins."""

    parts: list[TextPart]
    end: Position
    read: int
    """Bytes of the piece that were read up to there."""


@dataclass
class Encoded:
    """The result of a block."""

    tokens: dict[str, np.ndarray]
    """Of each split, with the tokens that begin and end each document."""
    documents: dict[str, int]
    damaged: list[dict[str, str]]
    """File, place and reason of each record that cannot be read."""
    text: dict[str, int]
    """Bytes of the documents of each split, in UTF-8."""


@dataclass
class Encoder:
    """Parses, splits and tokenises blocks."""

    kind: str
    """Kind of the source."""
    field: str
    tokenizer_name: str
    validation_fraction: float
    dtype: Literal["uint16", "uint32"]
    longest: int
    """Bytes of the longest document."""
    begin_token: str = "none"
    """As data.begin_token."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_name, self.begin_token)

    def encode(self, block: TextBlock) -> Encoded:
        """Return the tokens of a block. Raises `UserError` if the tokenizer cannot be had."""
        begin = np.array(self.tokenizer.before, self.dtype)
        end = np.array([self.tokenizer.end_of_text], self.dtype)
        tokens = {split: [np.empty(0, self.dtype)] for split in ("train", "validation")}
        done = Encoded({}, dict.fromkeys(tokens, 0), [], dict.fromkeys(tokens, 0))
        for part in block.parts:
            for at, raw in self.records(part):
                try:
                    text = self.read(raw)
                    content = text.strip().encode()
                    [encoded] = self.tokenizer.encode_batch([text]) if content else [end]
                except (Damage, Unencodable) as damage:
                    reason = str(damage)
                except UnicodeEncodeError:  # JSON can name one
                    reason = "its text has half of a surrogate pair"
                else:
                    if content:
                        split = self.split_of(content)
                        tokens[split] += [begin, encoded, end]
                        done.documents[split] += 1
                        done.text[split] += len(text.encode())
                    continue
                found = {"file": part.file, "place": place_in_file(part, at), "reason": reason}
                done.damaged.append(found)
        for split, arrays in tokens.items():
            done.tokens[split] = np.concatenate(arrays, dtype=self.dtype, casting="same_kind")
        return done

    def texts(self, block: TextBlock) -> Iterator[str]:
        """Yield the documents of a block that can be read."""
        for part in block.parts:
            for _, raw in self.records(part):
                with contextlib.suppress(Damage, UnicodeEncodeError):
                    text = self.read(raw)
                    if text.strip().encode():
                        yield text

    def split_of(self, content: bytes) -> str:
        """Return the split that a document belongs to, by a hash that its copies share."""
        digest = hashlib.blake2b(content, digest_size=8, key=bytes(8)).digest()
        share = int.from_bytes(digest, "little") / 2**64
        return "validation" if share < self.validation_fraction else "train"

    def records(self, part: TextPart) -> Iterator[tuple[int, "Record"]]:
        """Yield the records of a part as they were read, each with its offset, or its row."""
        if isinstance(part.content, list):
            yield from enumerate(part.content)
        elif self.kind == "jsonl":
            yield from lines_of(part.content)
        else:
            yield from documents_in(part.content, self.longest)

    def read(self, record: "Record") -> str:
        """Return the text of a record. Raises `Damage`."""
        if isinstance(record, Damage):
            raise record
        if record is not None and len(record) > self.longest:
            raise Damage(f"it is longer than {self.longest:,} bytes")
        text = decode(record) if isinstance(record, bytes) else record
        if self.kind == "jsonl" and text is not None:
            text = field_of(text, self.field)
        if text is None:
            raise Damage(f"it has no text in its field {self.field!r}")
        if self.kind in ("stdlib", "text") and "\r" in text:
            return text.replace("\r\n", "\n").replace("\r", "\n")
        return text


class Damage(Exception):
    """Why a record cannot be read."""


Record = bytes | str | Damage | None
"""The bytes of a document or line, or the value of a row, or why there is none."""


def decode(content: bytes) -> str:
    """Return the text of UTF-8, without a byte order mark. Raises `Damage`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Damage(f"it is not UTF-8 (byte {error.start} of it)") from None


def field_of(line: str, name: str) -> str | None:
    """Return the text in a field of a line of JSON; None if it has none. Raises `Damage`."""
    try:
        entries = json.loads(line)
    except RecursionError:
        raise Damage("it is nested too deeply") from None
    except ValueError as error:
        raise Damage(f"it is no JSON ({error})") from None
    text = entries.get(name) if isinstance(entries, dict) else None
    return text if isinstance(text, str) else None


def lines_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its offset."""
    begin = 0
    for line in content.split(b"\n"):
        if line.strip():
            yield begin, line
        begin += len(line) + 1


def documents_in(content: bytes, longest: int) -> Iterator[tuple[int, bytes | Damage]]:
    """Yield the documents of a text, each with its offset.

    One of more than `longest` bytes is cut at line ends into several. A line beyond that is damage.
    """
    begin = 0
    for end, following in [*separators(content), (len(content), 0)]:
        while end - begin > longest:
            cut = content.rfind(b"\n", begin, begin + longest) + 1
            if cut:
                yield begin, content[begin:cut]
            else:
                yield begin, Damage(f"its line is longer than {longest:,} bytes")
                cut = content.find(b"\n", begin, end) + 1 or end
            begin = cut
        yield begin, content[begin:end]
        begin = following


def separators(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each line that ends a document; the end is after its newline."""
    at = content.find(SEPARATOR)
    while at >= 0:
        begin = content.rfind(b"\n", 0, at) + 1
        end = content.find(b"\n", at) + 1 or len(content)
        if content[begin:end].strip() == SEPARATOR:
            yield begin, end
        at = content.find(SEPARATOR, end)


def place_in_file(part: TextPart, at: int) -> str:
    """Return where in its file a record is, as a person counts."""
    if part.unit == "byte":
        return f"byte {part.first + at}"
    if isinstance(part.content, bytes):
        at = part.content.count(b"\n", 0, at)
    return f"{part.unit} {part.first + at + 1}"
