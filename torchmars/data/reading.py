"""From a piece of the corpus to blocks of whole documents.

This runs in one process, so it does no more than it must: it decompresses, and finds where lines
and documents end. `documents` handles their contents.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchmars.config.entries import declare
from torchmars.config.source import DataSource, reader_of
from torchmars.core.errors import UserError, needs_package
from torchmars.core.places import place
from torchmars.data.corpus import Input, Piece, Sizes, is_plain
from torchmars.data.documents import SEPARATOR, Damage, Position, Record, TextBlock, TextPart
from torchmars.data.rows import dataset_parts, parquet_parts
from torchmars.storage import storage_of

CHUNK = 2**20  # bytes read at once of a plain file
COMPRESSED_CHUNK = 2**16  # of a compressed one, which may become many times as long
ZSTD_SLICE = 64  # bytes given to zstd at once: blocks of at least 4, each of 128 KiB at most


def read_piece(
    piece: Piece, source: DataSource, start: Position, sizes: Sizes
) -> Iterator[TextBlock]:
    """Yield the blocks of a piece from `start` on. Raises `UserError`."""
    number, offset, lines = start
    before = sum(each.size for each in piece[:number])
    parts: list[TextPart] = []
    size = 0
    for each in piece[number:]:
        number += 1
        for part in read_input(each, source, offset, lines, sizes):
            parts.append(part)
            size += part.size
            if size >= sizes.block:
                end = (number, 0, 0) if part.last else (number - 1, part.offset, part.lines)
                yield TextBlock(parts, end, before + part.read)
                parts, size = [], 0
        before += each.size
        offset = lines = 0
    if parts:
        yield TextBlock(parts, (number, 0, 0), before)


def read_input(
    each: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[TextPart]:
    """Yield an input part by part, from an offset on. Raises `UserError`."""
    try:
        yield from reader_of(READERS, source.kind)(each, source, offset, lines, sizes)
    except OSError as error:
        raise UserError(
            f"cannot read {each.name} of the corpus: {error.strerror or error}: start again when "
            "it can be read; what is done is kept"
        ) from None


def text_parts(
    each: Input, source: DataSource, offset: int, lines: int, sizes: Sizes
) -> Iterator[TextPart]:
    """Yield a file of text or of lines from byte `offset` on, before which are `lines` lines."""
    path = place(each.name, pattern=True)
    with path.open("rb") if isinstance(path, Path) else storage_of(path).open(path) as file:
        yield from TextReader(file, each, source.kind, offset).parts(lines, sizes)


# By the kind of a source. `Encoder` makes documents of the parts: of rows each is one already.
READERS: dict[str, Callable[[Input, DataSource, int, int, Sizes], Iterator[TextPart]]] = {
    "stdlib": text_parts,
    "text": text_parts,
    "jsonl": text_parts,
    "parquet": parquet_parts,
    "hf": dataset_parts,
}
declare(
    "READERS",
    READERS,
    lambda name, entry: "" if callable(entry) else f"must be a function, got {entry!r}",
)


class TextReader:
    """The unread rest of a file of text or of lines, or of a range of it.

    A line belongs to the range that has the newline before it, and a document to the one in which
    the separator before it begins. So ranges need not know of each other.
    """

    def __init__(self, file: BinaryIO, source: Input, kind: str, offset: int) -> None:
        self.file, self.input = file, source
        self.plain = is_plain(kind, source.name)
        self.mark = self.next_separator if kind != "jsonl" else self.next_line
        self.stop = source.end or 2**62
        self.entered = offset > 0 or source.begin == 0
        self.begin = offset if self.entered else source.begin - 1
        """Where `data` begins in the file, or in the contents of a compressed file."""
        self.data = bytearray()
        self.chunks = (read_plain if self.plain else read_compressed)(file, self.begin)
        self.ended = False
        self.damage: Damage | None = None
        """Why the file cannot be read to its end."""

    def parts(self, lines: int, sizes: Sizes) -> Iterator[TextPart]:
        """Yield the rest part by part; `lines` lines are before it."""
        unit = "byte" if self.input.begin else "line"
        of_lines = self.mark == self.next_line
        last = not (self.entered or self.enter())
        while not last:
            want = min(sizes.block, max(0, self.stop - self.begin))
            size, last = self.documents(want, sizes.document)
            first = self.begin if unit == "byte" else lines
            content: bytes | list[Record] = bytes(self.data[:size])
            lines += self.data.count(b"\n", 0, size)
            self.drop(size)
            if not size and not last:
                content = [Damage(f"its line is longer than {sizes.document:,} bytes")]
                lines += 1
                last = not self.drop_line() or of_lines and self.begin > self.stop
            if content:
                done = last and not self.damage
                yield TextPart(
                    self.input.name, content, first, unit, self.begin, lines, self.read(), done
                )
        if self.damage:
            first = self.begin if unit == "byte" else lines
            place = self.begin, lines, self.input.size
            yield TextPart(self.input.name, [self.damage], first, unit, *place, last=True)

    def documents(self, want: int, longest: int) -> tuple[int, bool]:
        """Return the length of documents at the start of the data, and whether they are the last.

        They have at least `want` bytes if there are as many. They have none where a line of more
        than `longest` bytes comes first. A longer document is cut at a line end.
        """
        if found := self.mark(want, want + longest):
            return found[1], self.begin + found[0] >= self.stop
        if self.ended and not self.damage:
            return len(self.data), True
        whole = 0  # of what was read, only whole documents
        seen = len(self.data) if self.ended else want
        while (found := self.mark(whole, 0)) and found[1] <= seen:
            whole = found[1]
        if self.ended:
            return whole, True
        return whole or self.data.rfind(b"\n", 0, longest) + 1, False

    def next_line(self, start: int, limit: int) -> tuple[int, int] | None:
        """Return begin and end of the first newline at or after `start`.

        None if there is none in `limit` bytes. All is relative to the data's begin.
        """
        at = self.find(b"\n", start, limit)
        return None if at < 0 else (at, at + 1)

    def next_separator(self, start: int, limit: int) -> tuple[int, int] | None:
        """Return begin and end of the first separator line that begins at or after `start`.

        None if there is none in `limit` bytes. All is relative to the data's begin.
        """
        at = self.find(SEPARATOR, start, limit)
        while at >= 0:
            begin = self.data.rfind(b"\n", 0, at) + 1
            end = self.find(b"\n", at, limit) + 1
            if not end:
                if not self.ended or self.damage:
                    return None
                end = len(self.data)
            if begin >= start and self.data[begin:end].strip() == SEPARATOR:
                return begin, end
            at = self.find(SEPARATOR, end, limit)
        return None

    def find(self, what: bytes, start: int, limit: int) -> int:
        """Return where `what` is next in the data; -1 if it is not there.

        Reads more of the file for it while there are no more than `limit` bytes.
        """
        while (at := self.data.find(what, start)) < 0:
            start = max(start, len(self.data) - len(what) + 1)
            if len(self.data) > limit or not self.grow():
                return -1
        return at

    def grow(self) -> bool:
        """Read more. Return whether there was more. Raises `OSError`."""
        try:
            self.data += next(self.chunks)
        except StopIteration:
            self.ended = True
        except Damage as damage:
            self.ended, self.damage = True, damage
        return not self.ended

    def enter(self) -> bool:
        """Go to where the first line or document of a range begins. Return whether there is one."""
        while self.begin < self.stop:
            if found := self.mark(1, CHUNK):
                mine = self.begin + found[0] < self.stop
                self.drop(found[1])
                return mine
            if self.ended:
                return False
            newline = self.data.rfind(b"\n")  # it stays: a line begins after it
            self.drop(newline if newline > 0 else len(self.data) - 1)
        return False

    def drop(self, count: int) -> None:
        """Forget the first bytes of the data."""
        del self.data[:count]
        self.begin += count

    def drop_line(self) -> bool:
        """Forget a line, however long it is. Return whether there is something after it."""
        while (at := self.data.find(b"\n")) < 0:
            self.drop(len(self.data))
            if not self.grow():
                return False
        self.drop(at + 1)
        return True

    def read(self) -> int:
        """Return how many bytes of the file, or of the range, have been read."""
        at = self.begin - self.input.begin if self.plain else self.file.tell()
        return min(self.input.size, at)


def read_plain(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield a file from an offset on."""
    file.seek(offset)
    while chunk := file.read(CHUNK):
        yield chunk


def read_compressed(file: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield the contents of a compressed file from an offset on.

    Raises `Damage` where it is damaged or cut short.
    """
    for chunk in decompressed(file):
        if offset < len(chunk):
            yield chunk[offset:]
        offset = max(0, offset - len(chunk))


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of a file, which may have been compressed in several streams.

    However much that is, it comes in pieces of about `CHUNK` at most. Raises `Damage`.
    """
    begin, contents = decoder_of(file.name)
    stream = None
    while chunk := file.read(COMPRESSED_CHUNK):
        while chunk:
            stream = stream or begin()
            try:
                rest = yield from contents(stream, chunk)
            except Exception as error:  # each of the libraries has its own
                raise Damage(f"from here on it cannot be decompressed ({error})") from None
            if not stream.eof:
                break
            chunk = (stream.unused_data + rest).lstrip(b"\0")  # padding between streams
            stream = None
    if stream:
        raise Damage("it is cut short here")


# Yields the contents of a stream's bytes. Returns bytes that are not part of the stream.
Contents = Generator[bytes, None, bytes]


def decoder_of(name: str) -> tuple[Callable[[], Any], Callable[[Any, bytes], Contents]]:
    """Return the magic bytes of a stream by a file's name, and its contents. Raises `UserError`."""
    if name.endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), gzip_contents
    if name.endswith(".xz"):
        return lzma.LZMADecompressor, xz_contents
    if name.endswith(".bz2"):
        return bz2.BZ2Decompressor, xz_contents
    with needs_package("zstandard", f"reading {name}"):
        import zstandard
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj, zstd_contents


def gzip_contents(stream: Any, chunk: bytes) -> Contents:
    while chunk and not stream.eof:
        yield stream.decompress(chunk, CHUNK)
        chunk = stream.unconsumed_tail
    return b""


def xz_contents(stream: Any, chunk: bytes) -> Contents:
    yield stream.decompress(chunk, CHUNK)
    while not (stream.eof or stream.needs_input):
        yield stream.decompress(b"", CHUNK)
    return b""


def zstd_contents(stream: Any, chunk: bytes) -> Contents:
    found = bytearray()
    for at in range(0, len(chunk), ZSTD_SLICE):  # it gives all that its input holds
        found += stream.decompress(chunk[at : at + ZSTD_SLICE])
        if stream.eof:
            break
        if len(found) >= COMPRESSED_CHUNK:
            yield bytes(found)
            found.clear()
    yield bytes(found)
    return chunk[at + ZSTD_SLICE :]
