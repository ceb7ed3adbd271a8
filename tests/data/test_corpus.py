"""Which files a corpus has, how it is cut into pieces, and what data.source may name."""

import os
import re
import sys
import threading

import pytest

from torchmars.begin import install_command
from torchmars.config import DataConfig
from torchmars.config.data import PartConfig
from torchmars.config.source import DataSource, parse_source
from torchmars.core import console
from torchmars.core.errors import UserError
from torchmars.data.corpus import Sizes, corpus_pieces, source_files


@pytest.mark.parametrize(
    "text,expected",
    [
        ("stdlib", DataSource("stdlib")),
        ("text", DataSource("text")),
        ("text:/a:b/*.txt", DataSource("text", glob="/a:b/*.txt")),
        ("jsonl:a/*.jsonl.zst", DataSource("jsonl", glob="a/*.jsonl.zst")),
        ("jsonl::content", DataSource("jsonl", field="content")),
        ("parquet:a.parquet:body", DataSource("parquet", glob="a.parquet", field="body")),
        ("hf:a/b", DataSource("hf", dataset="a/b")),
        ("hf:a/b::test:body", DataSource("hf", dataset="a/b", split="test", field="body")),
        ("openwebtext", DataSource("hf", dataset="Skylion007/openwebtext")),
        (
            "fineweb-edu:sample-10BT",
            DataSource("hf", dataset="HuggingFaceFW/fineweb-edu", config="sample-10BT"),
        ),
    ],
)
def test_sources(text, expected):
    assert parse_source(text) == expected


@pytest.mark.parametrize(
    "text,message",
    [
        ("jsnl:a", "of no known kind: .* did you mean jsonl?"),
        ("", "of no known kind"),
        ("my.txt", "of no known kind: .* did you mean text:my.txt?"),
        ("a/b.txt", "of no known kind: .* did you mean text:a/b.txt?"),
        ("stdlib:a", "too many parts: it must look like stdlib"),
        ("jsonl:a:b:c", "too many parts: it must look like jsonl:GLOB:FIELD"),
        ("hf:", "names no data set"),
    ],
)
def test_sources_of_another_form(text, message):
    with pytest.raises(UserError, match=message):
        parse_source(text)


def test_the_folder_of_the_shards_names_their_source():
    assert DataConfig().resolve().path == "data/stdlib-bytes"
    config = DataConfig("jsonl:/pile/*.jsonl.zst:body", tokenizer="gpt2").resolve()
    assert re.fullmatch(r"data/jsonl-pile-jsonl.zst-body-gpt2-[0-9a-f]{8}", config.path)
    assert DataConfig("hf:a/b", tokenizer="gpt2").resolve().path == "data/hf-a-b-gpt2"


CORPORA = [  # source and files; without their hash, folders of some would be the same
    ("text", ["a"]),
    ("text", ["b"]),
    ("text", ["a", "b"]),
    ("text", ["ab"]),
    ("text:a/*.txt", []),
    ("text:a?*.txt", []),
    ("text:a/*.txt", ["b"]),
    ("jsonl", ["a"]),
    ("jsonl::a", ["a"]),
    ("parquet", ["a"]),
]


@pytest.mark.parametrize("mixed", [False, True])
def test_corpora_of_files_do_not_share_a_default_folder(mixed):
    def path(source, files):
        if not mixed:
            return DataConfig(source, files=files).resolve().path
        part = PartConfig(source, 1.0, name="part", files=files)
        return DataConfig(mixture=[part]).resolve().corpora()[0].path

    assert len({path(*corpus) for corpus in CORPORA}) == len(CORPORA)
    assert path(*CORPORA[0]) == path(*CORPORA[0])


def test_files_folders_and_globs(tmp_path):
    for name in ("a.txt", "b.md", "c.py", "deep/d.txt", "e.log", "f.txt.zst", "g.jsonl", "h.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(*patterns, source="text"):
        files = source_files(
            DataConfig(source=source, files=[str(tmp_path / pattern) for pattern in patterns])
        )
        return [str(file.relative_to(tmp_path)) for file in files]

    assert found("c.py") == ["c.py"]
    assert found(".") == ["a.txt", "b.md", "deep/d.txt", "f.txt.zst"]
    assert found("*.txt", "a.txt", "**/*.log") == ["a.txt", "e.log"]
    assert found("a.txt", source=f"text:{tmp_path}/*.md") == ["a.txt", "b.md"]
    assert found(".", source="jsonl") == ["g.jsonl"]
    with pytest.raises(UserError, match="missing.txt' names no text file: correct the path$"):
        found("a.txt", "missing.txt")
    here = f"paths count from the folder that you start in, {re.escape(os.getcwd())}$"
    for source in ("text:mine.txt", "text:no/*.txt", "jsonl:../mine.jsonl"):
        with pytest.raises(UserError, match=f"names no (text|jsonl) file: {here}"):
            source_files(DataConfig(source=source))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="a folder gives its .txt and .md files"):
        found("empty")
    with pytest.raises(UserError, match="data.source: .* names no parquet file"):
        found("a.txt", source=f"parquet:{tmp_path}/*.parquet")


@pytest.mark.parametrize(
    "source,below",
    [("text:{}/**", ""), ("text:{}/a/*/x?", "/a"), ("text:{}", "")],
)
def test_a_long_walk_is_told_with_its_place(tmp_path, monkeypatch, capsys, source, below):
    """However long it takes: it ends here when that was said."""
    said = threading.Event()

    def say(text, error):
        sys.stderr.write(text)
        said.set()

    monkeypatch.setattr(console, "PATIENCE", 0.0)
    monkeypatch.setattr(console, "say", say)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: said.wait(60) and scandir(path))
    source = source.format(tmp_path)
    with pytest.raises(UserError, match="names no text file"):
        source_files(DataConfig(source=source))
    place = source.partition(":")[2]
    assert capsys.readouterr().err == (
        f"data.source: looking for {place!r} in all folders below {tmp_path}{below}"
    )


def test_pieces_hold_every_byte_once(tmp_path):
    sizes = {"a.txt": 10, "b.txt": 20, "c.txt": 250, "d.txt.gz": 250, "e.txt": 100, "f.txt": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    config = DataConfig(source="text", files=[str(tmp_path)])
    pieces = [
        [(each.name.rpartition("/")[2], each.begin, each.end, each.size) for each in piece]
        for piece in corpus_pieces(config, Sizes(piece=100))
    ]
    assert pieces == [
        [("a.txt", 0, None, 10), ("b.txt", 0, None, 20)],
        [("c.txt", 0, 83, 83)],
        [("c.txt", 83, 166, 83)],
        [("c.txt", 166, 250, 84)],
        [("d.txt.gz", 0, None, 250)],  # which cannot be cut
        [("e.txt", 0, None, 100), ("f.txt", 0, None, 0)],
    ]


def test_stdlib_has_text_everywhere():
    files = source_files(DataConfig(source="stdlib"))
    assert files == sorted(files) and len(files) > 300
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 5e6
    text = next(file for file in files if file.name == "argparse.py").read_text()
    assert "class ArgumentParser" in text


@pytest.mark.parametrize("package,source", [("datasets", "hf:a"), ("pyarrow", "parquet:{}")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, package, source):
    from torchmars.data.prepare import prepare_shards

    monkeypatch.setitem(sys.modules, package, None)
    # As in a process that has not imported it yet.
    monkeypatch.delitem(sys.modules, "torchmars.data.hub", raising=False)
    monkeypatch.delattr("torchmars.data.hub", raising=False)
    (tmp_path / "a.parquet").write_bytes(b"x")
    source = source.format(tmp_path / "a.parquet")
    needed = f"needs the package {package}: {install_command('data')}"
    with pytest.raises(UserError, match=re.escape(needed)):
        prepare_shards(DataConfig(source, path=str(tmp_path / "shards")).resolve())
