"""Tables: every type in which text lies in them, and what is told before any work is done."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from torchmars.config import DataConfig
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.data import corpus, prepare
from torchmars.data.corpus import Input, read_piece, row_groups
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
    shards = Path(changes.get("path", folder / "shards"))
    config = DataConfig(source.format(folder), path=str(shards), validation_fraction=1e-12)
    prepare.prepare_shards(replace(config, processes=1, **changes).resolve())
    splits = read_manifest(shards).splits.values()
    tokens = np.concatenate(
        [
            np.fromfile(shards / each.file, "<u2", each.tokens, offset=each.offset)
            for split in splits
            for each in split.shards
        ]
    )
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    damaged = shards / "damaged.jsonl"
    lines = damaged.read_text().splitlines() if damaged.exists() else []
    return [bytes(part[:-1].tolist()).decode() for part in parts], [
        (Path(each["file"]).name, each["place"], each["reason"]) for each in map(json.loads, lines)
    ]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_text_of_both_types_is_read(tmp_path, kind):
    write(tmp_path, column=pyarrow.array(TEXTS, kind))
    assert prepared(tmp_path) == ([text for text in TEXTS if text], [])


def test_values_that_are_null_or_no_utf8_are_damaged_records(tmp_path):
    raw = pyarrow.array([b"abc", b"\xff\xfe\xfd", None, b"def"])
    write(tmp_path, column=raw.view("string"))
    texts, damaged = prepared(tmp_path)
    assert texts == ["abc", "def"] and [each[:2] for each in damaged] == [
        ("a.parquet", "row 2"),
        ("a.parquet", "row 3"),
    ]
    assert "not UTF-8" in damaged[0][2] and "no text in its field 'text'" in damaged[1][2]


def test_runs_of_row_groups_are_read_as_the_whole_file(tmp_path, monkeypatch):
    texts = [f"text {number} " * (number % 50 + 1) for number in range(500)]
    write(tmp_path, column=pyarrow.array(texts), row_group_size=7, compression="none")
    whole = Input(str(tmp_path / "a.parquet"), (tmp_path / "a.parquet").stat().st_size)
    source = parse_source("parquet:a")
    monkeypatch.setattr(corpus, "BLOCK", 300)
    for size in (1000, 5000, 10**6):
        runs = row_groups(whole, source, size)
        assert (len(runs) > 3) == (size < 10**6)
        blocks = [block for block, _ in read_piece(runs, source)]
        records = [(number, record) for block in blocks for *_, number, record in block]
        assert records == [(number, text.encode()) for number, text in enumerate(texts, 1)]
        assert len(blocks) > 10 and 0 <= whole.size - sum(run.size for run in runs) < len(runs)


MISTAKES = {
    "missing": (lambda folder: write(folder, "b.parquet", field="body"), "of id .int64., body"),
    "number": (
        lambda folder: write(folder, "b.parquet", pyarrow.array([1])),
        "b.parquet has not one column 'text' of strings: .* text .int64",
    ),
    "twice": (
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.table([pyarrow.array(["a"])] * 2, ["text", "text"]), folder / "b.parquet"
        ),
        "of text .string., text .string",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_columns_are_looked_at_before_any_work(tmp_path, monkeypatch, name):
    make, message = MISTAKES[name]
    write(tmp_path, "a.parquet")
    make(tmp_path)
    monkeypatch.setattr(prepare.Preparation, "make_pieces", None)
    with pytest.raises(UserError, match=f"data.source: .*{message}") as mistake:
        prepared(tmp_path)
    assert "\n" not in str(mistake.value) and not (tmp_path / "shards").exists()


BROKEN = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "page": lambda whole: b"<!DOCTYPE html><html>Log in</html>" * 9,
    "pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_a_line_unless_it_is_a_small_part(tmp_path, name):
    write(tmp_path, "a.parquet")
    broken = BROKEN[name]((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "b.parquet").write_bytes(broken)
    numbers = np.random.default_rng(0).integers(0, 10**9, 200 * (1 + len(broken)))
    write(tmp_path, "c.parquet", pyarrow.array(numbers.astype(str)), compression="none")
    texts, [damaged] = prepared(tmp_path)
    assert texts == [*(text for text in TEXTS if text), *numbers.astype(str)]
    assert damaged[:2] == ("b.parquet", "row 1") and "it cannot be read (" in damaged[2]
    if broken:
        (tmp_path / "c.parquet").unlink()
        with pytest.raises(
            UserError, match="1 file that cannot .*% of it all .the first: .*b.parquet"
        ):
            prepared(tmp_path, path=str(tmp_path / "again"))
