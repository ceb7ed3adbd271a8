"""From a corpus to pieces, and from a piece to blocks of whole documents.

This runs in one process, so it does no more than it must: it decompresses, and finds where lines
and documents end. `documents` handles their contents.
"""

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from torchmars.config.entries import declare
from torchmars.config.source import KINDS, DataSource, reader_of
from torchmars.core.errors import UserError, needs_package
from torchmars.data.corpus import Input, Piece, Sizes, open_place
from torchmars.data.documents import SEPARATOR, Damage, LostFile, Record, TextPart
from torchmars.data.hub import load_dataset
from torchmars.data.rows import dataset_parts, parquet_parts, row_groups

PIECES = 2048  # about how many pieces a large corpus has
LOOKS = 8  # files that are looked at side by side: stores answer late
CHUNK = 2**18  # bytes read at once
SLICE = 64  # bytes decompressed at once: at most 2 MiB, of blocks of zstd of 4 bytes and 128 KiB
DEEPEST = 3  # packings within each other
# Where a range may begin. Other forms of these lines end documents too.
BORDERS = {"jsonl": re.compile(rb"\n"), "text": re.compile(rb"\n<\|endoftext\|>\r?\n")}
MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"
    rb"|(?P<xz>\xfd7zXZ\0)|(?P<bz2>BZh[1-9](1AY&SY|\x17rE8P\x90))"
)
POINTER = b"version https://git-lfs.github.com/spec/"


def corpus_pieces(source: DataSource, files: dict[str, int], sizes: Sizes) -> list[Piece]:
    """Return the pieces of a corpus whose files have so many bytes.

    They depend on the corpus alone: consecutive files make one piece up to its size, and a larger
    one is cut where its kind allows it. Raises `UserError`.
    """
    if source.kind == "hf":
        count = load_dataset(source).num_shards
        return [[Input(source.dataset, 1, number, count)] for number in range(count)]
    size = max(sizes.piece, sum(files.values()) // PIECES)

    def cut(name: str) -> list[Input]:
        whole = Input(name, files[name])
        try:
            if source.kind == "parquet":
                return row_groups(whole, source.field, size)
            return text_ranges(whole, source.kind, size) if KINDS[source.kind].plain else [whole]
        except OSError as error:
            raise cannot_read(name, error) from None

    pieces: list[Piece] = []
    room = 0
    with ThreadPoolExecutor(LOOKS) as threads:
        for inputs in threads.map(cut, files):
            if pieces and len(inputs) == 1 and inputs[0].size <= room:
                pieces[-1] += inputs
                room -= inputs[0].size
            else:
                pieces += [[each] for each in inputs]
                room = size - inputs[0].size if len(inputs) == 1 else 0
    return pieces


def text_ranges(whole: Input, kind: str, size: int) -> list[Input]:
    """Return ranges of a file, of at least `size` bytes if it is plain; all of it if not.

    Each begins where a line of JSON or a document does. Raises `OSError`.
    """
    if whole.size <= size:
        return [whole]
    with open_place(whole.name) as stream:
        if MAGIC.match(stream.read(16)):
            return [whole]
        cuts = [0]
        while cuts[-1] + size < whole.size:
            cuts.append(border_after(stream, cuts[-1] + size, BORDERS.get(kind, BORDERS["text"])))
        ends = [cut for cut in cuts[1:] if cut < whole.size] + [whole.size]
    return [Input(whole.name, end - begin, begin, end) for begin, end in zip(cuts, ends)]


def border_after(stream: Any, at: int, border: re.Pattern[bytes]) -> int:
    """Return where the first border after a byte of a file ends; beyond the file if there is none.

    It reads past the stream's buffer, which has many megabytes of a store.
    """
    stream.raw.seek(at)
    data = b""
    while chunk := stream.raw.read(CHUNK):
        data += chunk
        if found := border.search(data):
            return at + found.end()
        at, data = at + len(data[:-32]), data[-32:]
    return 2**62


def cannot_read(name: str, error: OSError) -> UserError:
    """Return the error of a file that the disk does not give."""
    return UserError(
        f"cannot read {name} of the corpus: {error.strerror or error}: start again when it can be "
        "read; what is done is kept"
    )


def read_piece(piece: Piece, source: DataSource, sizes: Sizes) -> Iterator[list[TextPart]]:
    """Yield the blocks of a piece: parts that are tokenised at once. Raises `UserError`."""
    reader = reader_of(READERS, source.kind)
    block: list[TextPart] = []
    size = 0
    for each in piece:
        try:
            for part in reader(each, source, sizes):
                block.append(part)
                size += part.size
                if size >= sizes.block:
                    yield block
                    block, size = [], 0
        except OSError as error:
            raise cannot_read(each.name, error) from None
    if block:
        yield block


def text_parts(each: Input, source: DataSource, sizes: Sizes) -> Iterator[TextPart]:
    """Yield a file of text or of lines, or a range of it, in parts of whole documents or lines.

    A document of more than `sizes.document` bytes is cut at a line end, a longer line is damaged.
    """
    of_lines = source.kind == "jsonl"
    border = last_line if of_lines else last_document
    unit = "byte" if each.begin else "line"
    first, want, seen, skipping = each.begin, sizes.block, each.begin, False
    data = bytearray()
    lost: list[Record] = []

    with open_place(each.name) as stream:

        def part(content: bytes | list[Record], lines: int, length: int) -> TextPart:
            nonlocal first, seen
            begin, first = first, first + (length if unit == "byte" else lines)
            read, seen = stream.tell() - seen, stream.tell()
            return TextPart(each.name, content, begin, unit, read)

        def taken(end: int) -> TextPart:
            content = bytes(data[:end])
            del data[:end]
            return part(content, content.count(b"\n"), end)

        for chunk in told_at_end(contents(stream, each), lost):
            data += chunk
            if skipping:
                end = data.find(b"\n") + 1
                first += (end or len(data)) if unit == "byte" else 0
                del data[: end or len(data)]
                skipping = not end
            while len(data) >= want and not skipping:
                end = border(data)
                if not end and len(data) <= sizes.document:
                    want = len(data) + sizes.block
                    break
                want = sizes.block
                end = end or (0 if of_lines else data.rfind(b"\n", 0, sizes.document) + 1)
                if end:
                    yield taken(end)
                else:
                    problem = Damage(f"its line is longer than {sizes.document:,} bytes")
                    end, skipping = data.find(b"\n") + 1, b"\n" not in data
                    yield part([problem], 1, end or len(data))
                    del data[: end or len(data)]
        if end := border(data) if lost else len(data):
            yield taken(end)
        if lost:
            yield part(lost, 0, 0)


def last_line(data: bytearray) -> int:
    """Return where the last whole line ends; 0 if there is none."""
    return data.rfind(b"\n") + 1


def last_document(data: bytearray) -> int:
    """Return where the last line that ends a document ends; 0 if there is none."""
    at = len(data)
    while (at := data.rfind(SEPARATOR, 0, at)) >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at) + 1
        if end and data[begin:end].strip() == SEPARATOR:
            return end
        at = begin
    return 0


# By the kind of a source. `Encoder` makes documents of the parts: of rows each is one already.
READERS: dict[str, Callable[[Input, DataSource, Sizes], Iterator[TextPart]]] = {
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


def told_at_end(chunks: Iterable[bytes], lost: list[Record]) -> Iterator[bytes]:
    """Yield chunks up to damage, which is put into a list."""
    try:
        yield from chunks
    except LostFile as damage:
        lost.append(damage)


def contents(stream: BinaryIO, each: Input) -> Iterator[bytes]:
    """Yield the bytes of a range of a plain file, or of a whole file, whatever it is packed by.

    Its first bytes tell, not its name. However much comes out, it comes in pieces of about a
    megabyte at most. Raises `LostFile` where it is damaged or cut short.
    """
    if each.end is not None:
        stream.seek(each.begin)
        for begin in range(each.begin, each.end, CHUNK):
            yield stream.read(min(CHUNK, each.end - begin))
        return
    chunks: Iterator[bytes] = iter(partial(stream.read, CHUNK), b"")
    for _ in range(DEEPEST + 1):
        start = b""
        while len(start) < len(POINTER) and (chunk := next(chunks, b"")):
            start += chunk
        chunks = chain([start], chunks)
        found = MAGIC.match(start)
        if not found:
            if start.startswith(POINTER):
                raise LostFile("it is a pointer of Git LFS: get the file itself by git lfs pull")
            yield from chunks
            return
        chunks = filter(None, decompressed(chunks, str(found.lastgroup), each.name))
    raise LostFile(f"it is packed more than {DEEPEST} times")


def decompressed(chunks: Iterable[bytes], packing: str, name: str) -> Iterator[bytes]:
    """Yield what was compressed, in one stream or several. Raises `LostFile`."""
    stream: Any = None
    limit = [CHUNK] if packing in ("xz", "bz2") else []  # others give all that a slice holds
    for chunk in chunks:
        found, rest = bytearray(), memoryview(chunk)
        while rest:
            if not stream:  # there may be padding between streams
                chunk = bytes(rest).lstrip(b"\0")
                if not chunk:
                    break
                rest = memoryview(chunk)
                stream = decoder_of(packing, name)
            try:
                found += stream.decompress(rest[:SLICE], *limit)
                while limit and not (stream.eof or stream.needs_input):
                    yield bytes(found)
                    found[:] = stream.decompress(b"", CHUNK)
            except Exception as error:  # each of the libraries has its own
                yield bytes(found)
                raise LostFile(f"from here on it cannot be decompressed ({error})") from None
            rest = rest[SLICE:]
            if stream.eof:
                left = len(rest) + len(stream.unused_data)
                rest, stream = memoryview(chunk)[len(chunk) - left :], None
            if len(found) >= CHUNK:
                yield bytes(found)
                found.clear()
        yield bytes(found)
    if stream:
        raise LostFile("it is cut short here")


def decoder_of(packing: str, name: str) -> Any:
    """Return what decompresses a stream of a file. Raises `UserError`."""
    if packing == "gzip":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    if packing == "xz":
        return lzma.LZMADecompressor()
    if packing == "bz2":
        return bz2.BZ2Decompressor()
    with needs_package("zstandard", f"reading {name}"):
        import zstandard
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
