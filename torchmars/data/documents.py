"""From blocks of raw text to tokens: the work of the processes that tokenise.

A process imports this file and a tokenizer, and nothing heavy.
"""

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchmars.data.tokenizer import TokenDtype, Tokenizer, Unencodable, load_tokenizer

SEPARATOR = b"<|endoftext|>"  # alone on a line, it ends a document of a text file


@dataclass
class TextPart:
    """Consecutive documents of one input, as they were read."""

    file: str
    content: "bytes | list[Record]"
    """Text, lines of JSON, or the values of rows. Where it cannot be read, why is its last one."""
    first: int = 0
    """Number of the first line or row, from 0, or the offset of the first byte."""
    unit: str = "line"
    """The unit of `first`: line, byte or row."""
    read: int = 0
    """Bytes of the input that were read for it."""

    @property
    def size(self) -> int:
        """Bytes or characters of its content, and one for each row."""
        if isinstance(self.content, bytes):
            return len(self.content)
        sizes = (len(each) for each in self.content if isinstance(each, (bytes, str)))
        return sum(sizes) + len(self.content)


@dataclass
class Damaged:
    """A record that cannot be read, or the rest of a file, and why."""

    file: str
    place: str
    reason: str
    rest: bool = False
    """Whether it is the rest of the file."""


@dataclass
class Encoded:
    """The result of a block."""

    tokens: dict[str, np.ndarray]
    """Of each split, with the tokens that begin and end each document."""
    documents: dict[str, int]
    damaged: list[Damaged]
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
    dtype: TokenDtype
    longest: int
    """Bytes of the longest document."""
    begin_token: str = "none"
    """As data.begin_token."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_name, self.begin_token)

    def encode(self, block: list[TextPart]) -> Encoded:
        """Return the tokens of a block. Raises `UserError` if the tokenizer cannot be had."""
        begin = np.array(self.tokenizer.before, self.dtype)
        end = np.array([self.tokenizer.end_of_text], self.dtype)
        tokens = {split: [np.empty(0, self.dtype)] for split in ("train", "validation")}
        done = Encoded({}, dict.fromkeys(tokens, 0), [], dict.fromkeys(tokens, 0))
        for part in block:
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
                rest = isinstance(raw, LostFile)
                done.damaged.append(Damaged(part.file, place_in_file(part, at), reason, rest))
        for split, arrays in tokens.items():
            done.tokens[split] = np.concatenate(arrays, dtype=self.dtype, casting="same_kind")
        return done

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
        elif text is None:
            raise Damage(f"it has no text in its field {self.field!r}")
        if self.kind in ("stdlib", "text") and "\r" in text:
            return text.replace("\r\n", "\n").replace("\r", "\n")
        return text


class Damage(Exception):
    """Why a record cannot be read."""


class LostFile(Damage):
    """Why the rest of a file cannot be read."""


Record = bytes | str | Damage | None
"""The bytes of a document or line, or the value of a row, or why there is none."""


def decode(content: bytes) -> str:
    """Return the text of UTF-8, without a byte order mark. Raises `Damage`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        name = "UTF-16" if wide else "LATIN1"
        raise Damage(
            f"it is not UTF-8 (byte {error.start} of it): if it is {name}, convert it by iconv "
            f"-f {name} -t UTF-8"
        ) from None


def field_of(line: str, name: str) -> str:
    """Return the text in a field of a line of JSON. Raises `Damage`."""
    try:
        entries = json.loads(line)
    except RecursionError:
        raise Damage("it is nested too deeply") from None
    except ValueError as error:
        wide = ": if it is UTF-16, convert it by iconv -f UTF-16 -t UTF-8" if "\0" in line else ""
        raise Damage(f"it is no JSON ({error}){wide}") from None
    entries = entries if isinstance(entries, dict) else {}
    if isinstance(text := entries.get(name), str):
        return text
    others = [key for key, value in entries.items() if isinstance(value, str)]
    known = f", but in {', '.join(map(repr, others[:5]))}: name it" if others else ""
    raise Damage(f"it has no text in its field {name!r}{known}")


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


ENCODERS: list[Encoder] = []  # that of this process, if it is one that tokenises


def begin_worker(encoder: Encoder) -> None:
    """Make this process one that tokenises. It ends with the process that started it."""

    def follow() -> None:
        starter = multiprocessing.parent_process()
        if starter is not None:
            starter.join()
            os._exit(1)

    ENCODERS[:] = [encoder]
    threading.Thread(target=follow, daemon=True).start()


def encode_block(block: list[TextPart]) -> Encoded:
    """Return the tokens of a block, in a process that tokenises."""
    return ENCODERS[0].encode(block)
