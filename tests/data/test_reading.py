"""A corpus is read alike whole, in ranges, compressed, and from any block on."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.full import full_but
from torchmars.config.source import parse_source
from torchmars.data.corpus import Input, Sizes, ranges
from torchmars.data.documents import (
    Damage,
    Encoder,
    TextBlock,
    TextPart,
    decode,
    documents_in,
    lines_of,
    place_in_file,
)
from torchmars.data.reading import COMPRESSED_CHUNK, read_compressed, read_piece

LONGEST = 60
PACKED = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
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


def found_in(inputs, kind, block, resume=True):
    """What is read of a piece; where it is begun anew at each block, this gives the same."""
    source, sizes = parse_source(kind), Sizes(block=block, document=LONGEST)
    blocks = list(read_piece(inputs, source, (0, 0, 0), sizes))
    if resume:
        for number, each in enumerate(blocks):
            rest = list(read_piece(inputs, source, each.end, sizes))
            assert str(rest) == str(blocks[number + 1 :])  # no two `Damage` are equal
    found = []
    for part in (part for each in blocks for part in each.parts):
        records = enumerate(part.content)
        if isinstance(part.content, bytes):
            records = (
                lines_of(part.content) if kind == "jsonl" else documents_in(part.content, LONGEST)
            )
        found += [None if isinstance(each, Damage) else each for _, each in records]
    if kind == "jsonl":
        found = [None if each and len(each) > LONGEST else each for each in found]
    return [each for each in found if each is None or each.strip()]


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(texts, st.integers(1, 40), st.integers(1, 100), st.sampled_from(list(PACKED)))
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_file_is_read_alike_however_it_is_cut(tmp_path_factory, kind, content, block, size, pack):
    folder = tmp_path_factory.getbasetemp()
    file, packed = folder / "a.txt", folder / f"a.txt{pack}"
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
    parts = ranges(whole, size) if content else []
    assert sum((found_in([part], kind, block) for part in parts), []) == expected


@pytest.mark.parametrize("pack", PACKED)
def test_files_of_several_streams_and_files_cut_short(tmp_path, pack):
    file = tmp_path / f"a.jsonl{pack}"
    numbers = range(1000)
    lines = [json.dumps({"text": f"{n * n * n * 7919 % 10007}"}) + "\n" for n in numbers]
    halves = ["".join(lines[:500]).encode(), "".join(lines[500:]).encode()]
    packed = [PACKED[pack](half) for half in halves]
    file.write_bytes(b"".join(packed))
    assert found_in([Input(str(file), 1)], "jsonl", 1000) == "".join(lines).encode().split()[:0] + [
        line.strip().encode() for line in lines
    ]
    file.write_bytes(b"".join(packed)[: -len(packed[1]) // 2])
    found = found_in([Input(str(file), 1)], "jsonl", 1000)
    assert 500 <= len(found) < 1000 and found[-1] is None
    assert found[:-1] == [line.strip().encode() for line in lines[: len(found) - 1]]
    file.write_bytes(packed[0] + b"junk" * 100)
    assert found_in([Input(str(file), 1)], "jsonl", 1000)[500:] == [None]


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


@pytest.mark.parametrize("pack", full_but([".gz", ".xz", ".zst"], PACKED))
def test_a_bomb_comes_out_in_small_pieces(tmp_path, pack):
    file = tmp_path / f"a.txt{pack}"
    file.write_bytes(BOMBS[pack]())
    assert file.stat().st_size < 2**17
    with file.open("rb") as stream:
        sizes = [len(each) for each in read_compressed(stream, 0)]
    assert max(sizes) <= Sizes().block + COMPRESSED_CHUNK and 2**26 <= sum(sizes) <= 2**26 + 2


def encoder(kind="jsonl", **changes):
    options = dict(
        kind=kind,
        field="text",
        tokenizer_name="bytes",
        validation_fraction=0.5,
        dtype="uint16",
        longest=LONGEST,
    )
    return Encoder(**options | changes)


@pytest.mark.parametrize("kind,line", [("jsonl", b'{"text": "a fox"}\n'), ("text", b"a fox\n")])
def test_a_byte_order_mark_is_no_part_of_a_record(kind, line):
    parts = [TextPart("a", each, 0) for each in (b"\xef\xbb\xbf" + line, line)]
    marked, plain = (encoder(kind).encode(TextBlock([part], (0, 0, 0), 0)) for part in parts)
    assert not marked.damaged and marked.text == plain.text
    for split, tokens in plain.tokens.items():
        assert marked.tokens[split].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "record,message",
    [
        (b'{"text": "a', "it is no JSON"),
        (b'["text"]', "no text in its field 'text'"),
        (b'{"other": "a"}', "no text in its field 'text'"),
        (b'{"text": 1}', "no text in its field 'text'"),
        (b'{"text": ' + b"9" * 5000 + b"}", "longer than 60 bytes"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 50, "no JSON"),
    ],
)
def test_damaged_records_are_named(record, message):
    part = TextPart("a.jsonl", b'{"text": "good"}\n\n' + record + b'\n{"text": "good"}\n', 10)
    done = encoder().encode(TextBlock([part], (0, 0, 0), 0))
    assert sum(done.documents.values()) == 2
    [damaged] = done.damaged
    assert damaged["file"] == "a.jsonl" and damaged["place"] == "line 13"
    assert message in damaged["reason"]


def test_places_are_as_a_person_counts():
    assert place_in_file(TextPart("a", b"x\ny\n", 0), 2) == "line 2"
    assert place_in_file(TextPart("a", b"x\ny\n", 100, "byte"), 2) == "byte 102"
    assert place_in_file(TextPart("a", ["x", "y"], 5, "row"), 1) == "row 7"


def test_copies_of_a_document_are_in_one_split():
    texts = [f"text {number}" for number in range(2000)]
    splits = [encoder().split_of(text.encode()) for text in texts]
    assert 900 < splits.count("validation") < 1100  # 4 sigma are 90
    assert splits == [encoder().split_of(text.encode()) for text in texts]
    fewer = [encoder(validation_fraction=0.25).split_of(text.encode()) for text in texts]
    assert all(a == "validation" for a, b in zip(splits, fewer) if b == "validation")


def test_line_ends_of_other_systems():
    part = TextPart("a.txt", b"one\r\ntwo\rthree", 0)
    [(_, raw)] = encoder("text").records(part)
    assert encoder("text").read(raw) == "one\ntwo\nthree"
    assert decode("é".encode()) == "é"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_line_of_100_megabytes_is_one_damaged_record(tmp_path, kind):
    record = b'{"text": "%s"}\n' if kind == "jsonl" else b"%s\n<|endoftext|>\n"
    texts = [b"a fox", b" " * 10**8 + b"x", b"the hill"]
    file = tmp_path / f"a.{kind}"
    file.write_bytes(b"".join(record % text for text in texts))
    blocks = read_piece(
        [Input(str(file), file.stat().st_size)], parse_source(kind), (0, 0, 0), Sizes()
    )
    done = [encoder(kind, longest=Sizes().document).encode(block) for block in blocks]
    assert sum(sum(each.documents.values()) for each in done) == 2
    [damaged] = [record for each in done for record in each.damaged]
    assert (
        damaged["place"].startswith("line ") and "longer than 33,554,432 bytes" in damaged["reason"]
    )
