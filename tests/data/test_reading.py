"""A corpus is read alike whole, in ranges and compressed, whatever its files are called."""

import bz2
import gzip
import json
import lzma
import re
import tracemalloc
from unittest import mock

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.full import full_but
from torchmars.config import DataConfig
from torchmars.config.source import parse_source
from torchmars.data import corpus
from torchmars.data.corpus import (
    Input,
    corpus_pieces,
    input_file,
    read_piece,
    text_ranges,
)
from torchmars.data.documents import Damage, Encoder, decode

LONGEST = 60
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0mars"  # a frame of zstd without content
PACKED = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: SKIPPED + zstandard.ZstdCompressor().compress(content),
}
lines = st.lists(
    st.sampled_from(
        ["", "a", "word " * 9, "x" * 70, "<|endoftext|>", " <|endoftext|>\t", "a <|endoftext|>"]
    ),
    max_size=30,
)
texts = st.tuples(lines, st.sampled_from(["", "\n"])).map(
    lambda drawn: ("\n".join(drawn[0]) + drawn[1]).encode()
)


def expected_texts(content):
    """The documents of a text, line by line; a line that is too long is None."""
    found, document = [], b""
    for line in content.splitlines(keepends=True):
        if line.strip() == b"<|endoftext|>":
            found, document = [*found, document], b""
        elif len(document + line) > LONGEST and document:
            found, document = [*found, document], line
        else:
            document += line
        if len(document) > LONGEST:
            found, document = [*found, None], b""
    return [each for each in [*found, document] if each is None or each.strip()]


def blocks_of(piece, kind, block=2**21, document=LONGEST):
    with mock.patch.multiple(corpus, BLOCK=block, LONGEST=document):
        return [each for each, _ in read_piece(piece, parse_source(kind))]


def found_in(piece, kind, block=2**21):
    """The records of a piece; one that is damaged is None."""
    records = [record for each in blocks_of(piece, kind, block) for *_, record in each]
    found = [None if isinstance(each, Damage) else each for each in records]
    found = [None if each and len(each) > LONGEST else each for each in found]
    return [each for each in found if each is None or each.strip()]


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(texts, st.integers(1, 40), st.integers(1, 100), st.sampled_from(list(PACKED)))
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_file_is_read_alike_however_it_is_cut(tmp_path_factory, kind, content, block, size, pack):
    folder = tmp_path_factory.getbasetemp()
    file, packed = folder / "a.txt", folder / "b.txt"
    file.write_bytes(content)
    packed.write_bytes(PACKED[pack](content))
    expected = (
        [None if len(line) > LONGEST else line for line in content.split(b"\n") if line.strip()]
        if kind == "jsonl"
        else expected_texts(content)
    )
    whole = Input(str(file), len(content))
    assert found_in([whole], kind, block) == expected
    assert found_in([whole, whole], kind, block) == expected * 2
    assert found_in([Input(str(packed), 1)], kind, block) == expected
    parts = text_ranges(whole, parse_source(kind), size)
    assert sum(part.size for part in parts) == whole.size
    assert sum((found_in([part], kind, block) for part in parts), []) == expected


RECORDS = [json.dumps({"text": f"{n * n * n * 7919 % 10007}"}) + "\n" for n in range(1000)]


@pytest.mark.parametrize("pack", PACKED)
def test_files_of_several_streams_and_files_cut_short(tmp_path, pack):
    file = tmp_path / f"a.jsonl{pack}"
    packed = [PACKED[pack]("".join(half).encode()) for half in (RECORDS[:500], RECORDS[500:])]
    file.write_bytes(b"".join(packed))
    expected = [line.strip().encode() for line in RECORDS]
    assert found_in([Input(str(file), 1)], "jsonl") == expected
    file.write_bytes(b"".join(packed)[: -len(packed[1]) // 2])
    found = found_in([Input(str(file), 1)], "jsonl")
    least = 500 * (pack != ".zst")  # Arrow gives no part of what it reads at once
    assert least < len(found) < 1000 and found == [*expected[: len(found) - 1], None]
    if pack != ".zst":  # of which Arrow tells junk without its place
        file.write_bytes(packed[0] + b"junk" * 100_000)  # more than the packages read ahead
        assert found_in([Input(str(file), 1)], "jsonl")[500:] == [None]


def test_a_lack_of_memory_is_no_damage_of_a_file(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(MemoryError), input_file(str(tmp_path / "a")):
        raise MemoryError


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_the_first_bytes_say_how_a_file_is_compressed_not_its_name(tmp_path, name):
    expected, content = [line.strip().encode() for line in RECORDS], "".join(RECORDS).encode()
    for number, packed in enumerate(
        [
            content,
            *(pack(content) for pack in PACKED.values()),
            gzip.compress(gzip.compress(content)),
            lzma.compress(PACKED[".zst"](content)),
            gzip.compress(content) + bytes(2**19),  # padding, to the end of a tape's block
        ]
    ):
        (tmp_path / name).write_bytes(packed)
        whole = Input(str(tmp_path / name), len(packed))
        cut = text_ranges(whole, parse_source("jsonl"), 5000)
        assert len(cut) > 1 if number == 0 else cut == [whole]
        assert found_in([whole], "jsonl") == expected


@pytest.mark.parametrize(
    "content,reason",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git lfs pull"),
        (gzip.compress(b"a" * 50)[:-9], "ended before the end-of-stream marker"),
        (gzip.compress(b"a" * 50)[:-8] + bytes(8), "CRC check failed"),
        (lzma.compress(b"a") + b"mars" * 5, "LZMAError"),
        (lzma.compress(b"a") + bytes(8) + lzma.compress(b"b"), "LZMAError"),
        (bz2.compress(b"a") + bz2.compress(b"b").replace(b"AY", b"YA"), "Invalid data stream"),
        (gzip.compress(bz2.compress(b"a") + b"mars"), "Invalid data stream"),
    ],
    ids=["a pointer of LFS", "cut short", "another checksum", "more", "zeros", "damaged", "inside"],
)
def test_a_file_that_cannot_be_read_to_its_end_is_told_as_one(tmp_path, content, reason):
    (tmp_path / "a.txt").write_bytes(content)
    [block] = blocks_of([Input(str(tmp_path / "a.txt"), len(content))], "text")
    [damage] = encoder("text").encode(block)[1].damaged
    assert damage.rest and damage.place == "line 1" and reason in damage.reason


def zstd_bomb(blocks):
    """A frame of zstd whose blocks of 4 bytes each stand for a letter 2^17 times."""
    block = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    last = (1 | 1 << 1).to_bytes(3, "little") + b"a"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * blocks + last


BOMBS = {
    ".gz": lambda: gzip.compress(b"a" * 2**25) * 2,
    ".xz": lambda: lzma.compress(b"a" * 2**25, preset=0) * 2,
    ".bz2": lambda: bz2.compress(b"a" * 2**25) * 2,
    ".zst": lambda: zstd_bomb(2**8) * 2,
}


@pytest.mark.parametrize("pack", full_but([".gz", ".zst"], PACKED))
def test_a_bomb_takes_no_memory(tmp_path, pack):
    file = tmp_path / "a.txt"
    file.write_bytes(BOMBS[pack]())
    tracemalloc.start()
    [block] = blocks_of([Input(str(file), file.stat().st_size)], "text", document=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    [damage] = encoder("text", 2**20).encode(block)[1].damaged
    assert "longer than" in damage.reason and peak < 2**24


def encoder(kind="jsonl", longest=LONGEST, fraction=0.5):
    return Encoder(DataConfig(validation_fraction=fraction), parse_source(kind), longest)


@pytest.mark.parametrize("kind,line", [("jsonl", b'{"text": "a fox"}\n'), ("text", b"a fox\n")])
def test_a_byte_order_mark_is_no_part_of_a_record(kind, line):
    marked, plain = (
        encoder(kind).encode([("a", "line", 1, each)]) for each in (b"\xef\xbb\xbf" + line, line)
    )
    assert not marked[1].damaged and marked[1] == plain[1]
    for split, tokens in plain[0].items():
        assert marked[0][split].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "record,message",
    [
        (b'{"text": "a', "it is no JSON"),
        (b'["text"]', "no text in its field 'text'"),
        (b'{"raw": "a", "id": 1}', "no text in its field 'text', but in 'raw': name it"),
        (b'{"text": 1}', "no text in its field 'text'"),
        (b'{"text": ' + b"9" * 5000 + b"}", "longer than 60 bytes"),
        (b'{"text": "\xff"}', "not UTF-8 .*LATIN1"),
        (b"\xff\xfe{", "not UTF-8 .*if it is UTF-16"),
        (b"{\0'\0", "no JSON .*UTF-16"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 50, "no JSON"),
    ],
)
def test_damaged_records_are_named(record, message):
    lines = [(11, b'{"text": "good"}'), (13, record), (14, b'{"text": "good"}')]
    _, done = encoder().encode([("a.jsonl", "line", *each) for each in lines])
    assert sum(split.documents for split in done.splits.values()) == 2
    [damaged] = done.damaged
    assert damaged.file == "a.jsonl" and damaged.place == "line 13" and not damaged.rest
    assert re.search(message, damaged.reason)


def test_copies_of_a_document_are_in_one_split():
    texts = [f"text {number}" for number in range(2000)]
    splits = [encoder().split_of(text.encode()) for text in texts]
    assert 900 < splits.count("validation") < 1100  # 4 sigma are 90
    fewer = [encoder(fraction=0.25).split_of(text.encode()) for text in texts]
    assert all(a == "validation" for a, b in zip(splits, fewer) if b == "validation")


def test_line_ends_of_other_systems():
    assert encoder("text").read(b"one\r\ntwo\rthree") == "one\ntwo\nthree"
    assert decode("é".encode()) == "é"


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_line_of_many_megabytes_is_one_damaged_record(tmp_path, kind):
    record = b'{"text": "%s"}\n' if kind == "jsonl" else b"%s\n<|endoftext|>\n"
    file = tmp_path / "a"
    file.write_bytes(b"".join(record % text for text in (b"fox", b" " * 10**7 + b"x", b"hill")))
    whole = Input(str(file), file.stat().st_size)
    blocks = blocks_of([whole], kind, block=1000, document=2**20)
    done = [encoder(kind, longest=2**20).encode(block)[1] for block in blocks]
    assert sum(split.documents for each in done for split in each.splits.values()) == 2
    [damaged] = [record for each in done for record in each.damaged]
    assert damaged.place == f"line {2 if kind == 'jsonl' else 3}"
    assert "longer than 1,048,576 bytes" in damaged.reason


def test_pieces_hold_every_byte_once(tmp_path, monkeypatch):
    contents = {
        "a.jsonl": b"x" * 10,
        "b.jsonl": b"x" * 20,
        "c.jsonl": b"1234567890123456789\n" * 12 + b"1234567890",
        "d.jsonl": gzip.compress(bytes(range(256)) * 2),
        "e.jsonl": b"x" * 100,
        "f.jsonl": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = {str(tmp_path / name): len(content) for name, content in contents.items()}
    monkeypatch.setattr(corpus, "PIECE", 100)
    pieces = [
        [(each.name.rpartition("/")[2], each.begin, each.end, each.size) for each in piece]
        for piece in corpus_pieces(parse_source("jsonl"), files)
    ]
    assert pieces == [
        [("a.jsonl", 0, None, 10), ("b.jsonl", 0, None, 20)],
        [("c.jsonl", 0, 120, 120)],
        [("c.jsonl", 120, 240, 120)],
        [("c.jsonl", 240, 250, 10)],
        [("d.jsonl", 0, None, len(contents["d.jsonl"]))],  # which cannot be cut
        [("e.jsonl", 0, None, 100), ("f.jsonl", 0, None, 0)],
    ]
