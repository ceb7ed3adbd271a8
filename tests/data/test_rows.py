"""Tables: every type in which text lies in them, and what is told before any work is done."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.full import full_but
from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.data import prepare
from torchmars.data.manifest import read_manifest

TEXTS = ["a fox", "é \u2028 \0", "", "the hill"]


def table_of(column, name="text"):
    numbers = pyarrow.array(range(len(column)), pyarrow.int64())
    return pyarrow.table([numbers, column], ["id", name])


def write(folder, name="a.parquet", column=None, **options):
    column = pyarrow.array(TEXTS) if column is None else column
    field = options.pop("field", "text")
    pyarrow.parquet.write_table(table_of(column, field), folder / name, **options)


def prepared(folder, source="parquet:{}", **changes):
    """The documents that a preparation reads, in order, and the records that are damaged."""
    shards = folder / "shards"
    config = DataConfig(source.format(folder), path=str(shards), validation_fraction=1e-12)
    prepare.prepare_shards(replace(config, processes=1, **changes).resolve())
    files = [shards / each.file for each in read_manifest(shards).splits["train"].shards]
    files.append(shards / "validation-tail.bin")
    tokens = np.concatenate([np.fromfile(file, "<u2") for file in files])
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    damaged = shards / "damaged.jsonl"
    lines = damaged.read_text().splitlines() if damaged.exists() else []
    return [bytes(part[:-1].tolist()).decode() for part in parts], [
        (Path(each["file"]).name, each["place"], each["reason"]) for each in map(json.loads, lines)
    ]


def encoded(texts):
    return [text.encode() for text in texts]


TYPES = {
    "string": pyarrow.array(TEXTS),
    "large_string": pyarrow.array(TEXTS, pyarrow.large_string()),
    "string_view": pyarrow.array(TEXTS, pyarrow.string_view()),
    "binary": pyarrow.array(encoded(TEXTS)),
    "large_binary": pyarrow.array(encoded(TEXTS), pyarrow.large_binary()),
    "binary_view": pyarrow.array(encoded(TEXTS), pyarrow.binary_view()),
    "dictionary": pyarrow.array(TEXTS).dictionary_encode(),
    "dictionary of bytes": pyarrow.array(encoded(TEXTS)).dictionary_encode(),
    "json": pyarrow.array(TEXTS, pyarrow.json_(pyarrow.large_string())),
    "extension": pyarrow.ExtensionArray.from_storage(
        pyarrow.opaque(pyarrow.string(), "x", "y"), pyarrow.array(TEXTS)
    ),
}


@pytest.mark.parametrize("stored", full_but([False], [True, False]))  # Arrow's own types too
@pytest.mark.parametrize("kind", TYPES)
def test_text_of_every_type_is_read(tmp_path, kind, stored):
    write(tmp_path, column=TYPES[kind], store_schema=stored)
    read = pyarrow.parquet.read_table(tmp_path / "a.parquet")["text"].to_pylist()
    expected = [each.decode() if isinstance(each, bytes) else each for each in read]
    assert expected == TEXTS
    assert prepared(tmp_path) == ([text for text in expected if text], [])


def test_text_of_a_fixed_size_and_bytes_that_are_none(tmp_path):
    write(tmp_path, column=pyarrow.array([b"abc", b"\xff\xfe\xfd", b"def"], pyarrow.binary(3)))
    texts, [damage] = prepared(tmp_path)
    assert texts == ["abc", "def"]
    assert damage[:2] == ("a.parquet", "row 2") and "not UTF-8" in damage[2]


COMPRESSIONS = ["snappy", "gzip", "brotli", "zstd", "lz4", "none"]


@pytest.mark.parametrize("compression", full_but(["zstd"], COMPRESSIONS))
def test_shards_of_other_schemas_empty_ones_and_other_compressions(tmp_path, compression):
    columns = [
        pyarrow.array(["one"]),
        pyarrow.array([], pyarrow.string()),
        pyarrow.array(["two"], pyarrow.large_string()),
        pyarrow.array([]),  # of no type, without rows
        pyarrow.array(["three"]).dictionary_encode(),
    ]
    for number, column in enumerate(columns):
        write(tmp_path, f"{number}.parquet", column, compression=compression)
    with pyarrow.parquet.ParquetWriter(tmp_path / "5.parquet", table_of(columns[0]).schema) as file:
        for text in (["four"], [], ["five"]):
            file.write_table(table_of(pyarrow.array(text, pyarrow.string())), row_group_size=1)
    assert prepared(tmp_path) == (["one", "two", "three", "four", "five"], [])


@pytest.mark.parametrize("kind", [pyarrow.null(), pyarrow.string(), pyarrow.large_binary()])
def test_a_shard_whose_column_is_all_null_is_one_damaged_record(tmp_path, kind):
    write(tmp_path, "a.parquet")
    write(tmp_path, "b.parquet", pyarrow.array([None] * 500, kind), row_group_size=100)
    write(tmp_path, "c.parquet", pyarrow.array(["last", None]))
    texts, damaged = prepared(tmp_path, max_damaged=2)
    assert texts == [text for text in TEXTS if text] + ["last"]
    assert [each[:2] for each in damaged] == [("b.parquet", "row 1"), ("c.parquet", "row 2")]
    assert "its column 'text' is null in all 500 rows" in damaged[0][2]


def test_columns_whose_names_look_like_others(tmp_path):
    """Dots are no path into a column, and words of a language are names as others."""
    nested = pyarrow.array([{"text": "no"}, {"text": "no"}])
    names = ["meta", "meta.text", "select", "a b, c"]
    texts = [pyarrow.array([f"{name} {number}" for number in range(2)]) for name in names]
    table = pyarrow.table([nested, *texts[1:]], names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for number, name in enumerate(names[1:]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.parquet").symlink_to(tmp_path / "a.parquet")
        found, damaged = prepared(tmp_path / str(number), f"parquet:{{}}:{name}")
        assert (found, damaged) == ([f"{name} 0", f"{name} 1"], [])


MISTAKES = {
    "missing": (lambda folder: write(folder, "b.parquet", field="body"), "no column 'text': name"),
    "number": (
        lambda folder: write(folder, "b.parquet", pyarrow.array([1])),
        "the column 'text' of .*b.parquet is int64, not text",
    ),
    "list": (
        lambda folder: write(folder, "b.parquet", pyarrow.array([["a"]])),
        "is list<element: string>, not text",
    ),
    "struct": (
        lambda folder: write(folder, "b.parquet", pyarrow.array([{"text": "a"}])),
        "is struct<text: string>, not text",
    ),
    "uuid": (
        lambda folder: write(folder, "b.parquet", pyarrow.array([b"a" * 16], pyarrow.uuid())),
        "is extension<arrow.uuid>, not text",
    ),
    "twice": (
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.table([pyarrow.array(["a"])] * 2, ["text", "text"]), folder / "b.parquet"
        ),
        "b.parquet has 2 columns 'text'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_columns_are_looked_at_before_any_work(tmp_path, monkeypatch, name):
    make, message = MISTAKES[name]
    write(tmp_path, "a.parquet")
    make(tmp_path)
    monkeypatch.setattr(prepare, "make_pieces", None)
    with pytest.raises(UserError, match=f"data.source: .*{message}") as mistake:
        prepared(tmp_path)
    assert "\n" not in str(mistake.value) and not (tmp_path / "shards.partial").exists()


def test_files_that_cannot_be_read_are_one_damaged_record_each(tmp_path):
    write(tmp_path, "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for number, content in enumerate(
        (b"", b"PAR1", whole[:-30], whole.replace(b"PAR1", b"PARE"), b"{}" * 100)
    ):
        (tmp_path / f"b{number}.parquet").write_bytes(content)
    texts, damaged = prepared(tmp_path)
    assert texts == [text for text in TEXTS if text] and len(damaged) == 5
    assert all("from here on it cannot be read" in reason for _, _, reason in damaged)
