"""From blocks of raw text to tokens: the work of the processes that tokenise.

A process imports this file and a tokenizer, and nothing heavy.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from torchmars.config import DataConfig
from torchmars.config.source import DataSource
from torchmars.data.manifest import SPLITS, Split
from torchmars.data.tokenizer import Unencodable, load_tokenizer, smallest_dtype

SEPARATOR = b"<|endoftext|>"  # alone on a line, it ends a document of a text file
SEPARATED = re.compile(rb"(<\|endoftext\|>.*\n?)")  # from there to the end of its line


class Damage(Exception):
    """Why a record cannot be read."""


class LostFile(Damage):
    """Why the rest of a file cannot be read."""


loaded = lru_cache(maxsize=1)(load_tokenizer)  # for the blocks of a process, one after the other
Record = bytes | str | Damage | None
"""The bytes of a document or line, or the value of a row, or why there is none."""
Block = list[tuple[str, str, int, Record]]
"""Records that are tokenised at once, each with its file and its number there, after the unit of
that: line, where from they are counted, or row. Where a file cannot be read, why is the last one.
"""


@dataclass
class Damaged:
    """A record that cannot be read, or the rest of a file, and why."""

    file: str
    place: str
    reason: str
    rest: bool = False
    """Whether it is the rest of the file."""


@dataclass
class Part:
    """What has been made of a part of a corpus."""

    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    damaged: list[Damaged] = field(default_factory=list)

    def add(self, other: "Part") -> None:
        """Append what follows."""
        for name, split in other.splits.items():
            self.splits[name].add(split)
        self.damaged += other.damaged


@dataclass
class Encoder:
    """Parses, splits and tokenises blocks of a corpus."""

    config: DataConfig
    source: DataSource
    longest: int
    """Bytes of the longest document."""

    def encode(self, block: Block) -> tuple[dict[str, np.ndarray], Part]:
        """Return the tokens of a block, of each split, and what they are.

        Raises `UserError` if the tokenizer cannot be had.
        """
        tokenizer = loaded(self.config.tokenizer, self.config.begin_token)
        dtype = smallest_dtype(tokenizer.vocab_size)
        begin, end = np.array(tokenizer.before, dtype), np.array([tokenizer.end_of_text], dtype)
        arrays, part = {name: [np.empty(0, dtype)] for name in SPLITS}, Part()
        for file, unit, number, raw in block:
            try:
                text = self.read(raw)
                content = text.strip().encode()
                if content:
                    encoded = tokenizer.encode(text)
                    name = self.split_of(content)
                    arrays[name] += [begin, encoded, end]
                    part.splits[name].documents += 1
                    part.splits[name].text_bytes += len(text.encode())
            except (Damage, Unencodable, UnicodeEncodeError) as error:
                # JSON can name half of a surrogate pair.
                place, rest = f"{unit} {number}", isinstance(error, LostFile)
                part.damaged.append(Damaged(file, place, str(error), rest))
        tokens = {name: np.concatenate(each) for name, each in arrays.items()}
        for name, split in part.splits.items():
            split.tokens, split.max_token = len(tokens[name]), int(tokens[name].max(initial=0))
        return tokens, part

    def split_of(self, content: bytes) -> str:
        """Return the split that a document belongs to, by a hash that its copies share."""
        digest = hashlib.blake2b(content, digest_size=8, key=bytes(8)).digest()
        share = int.from_bytes(digest, "little") / 2**64
        return "validation" if share < self.config.validation_fraction else "train"

    def read(self, record: Record) -> str:
        """Return the text of a record. Raises `Damage`."""
        if isinstance(record, Damage):
            raise record
        if record is None:
            raise Damage(f"it has no text in its field {self.source.field!r}")
        if len(record) > self.longest:
            raise Damage(f"it is longer than {self.longest:,} bytes")
        text = decode(record) if isinstance(record, bytes) else record
        if self.source.kind == "jsonl":
            return field_of(text, self.source.field)
        if self.source.kind in ("stdlib", "text") and "\r" in text:
            return text.replace("\r\n", "\n").replace("\r", "\n")
        return text


def decode(content: bytes) -> str:
    """Return the text of UTF-8, without a byte order mark. Raises `Damage`."""
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        name = "UTF-16" if wide else "LATIN1"
        remedy = f"if it is {name}, convert it by iconv -f {name} -t UTF-8"
        raise Damage(f"it is not UTF-8 (byte {error.start} of it): {remedy}") from None


def field_of(line: str, name: str) -> str:
    """Return the text in a field of a line of JSON. Raises `Damage`."""
    try:
        entries = json.loads(line)
    except (ValueError, RecursionError) as error:
        wide = ": if it is UTF-16, convert it by iconv -f UTF-16 -t UTF-8" if "\0" in line else ""
        raise Damage(f"it is no JSON ({error}){wide}") from None
    entries = entries if isinstance(entries, dict) else {}
    if isinstance(text := entries.get(name), str):
        return text
    others = [key for key, value in entries.items() if isinstance(value, str)]
    known = f", but in {', '.join(map(repr, others[:5]))}: name it" if others else ""
    raise Damage(f"it has no text in its field {name!r}{known}")


Numbered = tuple[int, bytes]  # whole lines, or a document, and the number of its first line


def documents_of(blocks: Iterable[Numbered], longest: int) -> Iterator[Numbered]:
    """Yield the documents of blocks of whole lines, which end at the lines of `SEPARATOR`.

    One of more than `longest` bytes is cut at line ends into several. A line beyond that is alone.
    """
    document, begin = bytearray(), 0
    for number, block in blocks:
        for text in SEPARATED.split(block):
            begin = begin if document else number
            number += text.count(b"\n")
            line = document.rfind(b"\n") + 1  # which `text` goes on with, or begins
            if text.strip() != SEPARATOR or document[line:].strip():
                document += text
            else:
                del document[line:]
                yield begin, bytes(document)
                document.clear()
            while len(document) > longest:
                end = document.rfind(b"\n", 0, longest) + 1 or document.find(b"\n") + 1
                if not end:
                    break
                yield begin, bytes(document[:end])
                begin += document.count(b"\n", 0, end)
                del document[:end]
    yield begin, bytes(document)
