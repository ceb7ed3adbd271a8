"""Which files a corpus has, how it is cut into pieces, and what data.source may name."""

import os
import re
import sys

import pytest

from tests.support.full import FULL
from tests.support.store import BUCKET, s3_server
from torchmars.begin import install_command
from torchmars.config import DataConfig
from torchmars.config.data import PartConfig
from torchmars.config.source import DataSource, parse_source
from torchmars.core.errors import UserError
from torchmars.core.places import ObjectPath
from torchmars.data.corpus import matching_files, source_files
from torchmars.storage.objects import store_of


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


def written(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder, *patterns, source="text"):
    patterns = [str(folder / pattern) for pattern in patterns]
    files = source_files(DataConfig(source=source, files=patterns))
    return [str(file.relative_to(folder)) for file in files]


def test_files_folders_and_globs(tmp_path, capsys):
    written(tmp_path, "a.txt", "b.md", "c.py", "deep/__init__.txt", "e.log", "f.txt.zst", "h.gz")
    written(tmp_path, ".git/d.txt", ".h.txt", "deep/.i.txt", "[x]/j.txt")
    assert found(tmp_path, "c.py") == ["c.py"]
    every = ["[x]/j.txt", "a.txt", "b.md", "deep/__init__.txt", "f.txt.zst"]
    assert found(tmp_path, ".") == every
    said = capsys.readouterr().out
    assert "has 3 files of other ends than .txt, .md (the first: " in said and "c.py)" in said
    assert "a glob such as **/*.py reads them" in said
    assert found(tmp_path, "*.txt", "a.txt", "**/*.log") == ["a.txt", "e.log"]
    assert found(tmp_path, "**/*.txt") == ["[x]/j.txt", "a.txt", "deep/__init__.txt"]
    assert found(tmp_path, "[x]") == ["[x]/j.txt"]
    assert found(tmp_path, "deep/.i.txt", ".git/*.txt") == [".git/d.txt", "deep/.i.txt"]
    assert found(tmp_path, "a.txt", source=f"text:{tmp_path}/*.md") == ["a.txt", "b.md"]
    (tmp_path / "deep" / "link.txt").symlink_to("../a.txt")
    (tmp_path / "deep" / "gone.txt").symlink_to("nowhere")  # whoever reads it says so
    names = ["__init__.txt", "gone.txt", "link.txt"]
    assert found(tmp_path, "deep") == [f"deep/{name}" for name in names]
    assert capsys.readouterr().out == ""


def test_files_of_all_ends_of_their_kind(tmp_path):
    ends = [".jsonl", ".ndjson", ".jl", ".jsonl.gz", ".json.gz", ".jsonl.zstd", ".jl.gzip"]
    written(tmp_path, "z.json", *(f"{number}{end}" for number, end in enumerate(ends)))
    assert found(tmp_path, ".", source="jsonl") == sorted(f"{n}{end}" for n, end in enumerate(ends))
    written(tmp_path, "a.parquet", "b.parq", "c.pq", "d.parquet.gz")
    assert found(tmp_path, ".", source="parquet") == ["a.parquet", "b.parq", "c.pq"]


def test_what_is_not_there_is_a_line(tmp_path, capsys):
    (tmp_path / "a.log").touch()
    with pytest.raises(UserError, match="missing.txt' names no text file: "):
        found(tmp_path, "missing.txt")
    here = f"paths count from the folder that you start in, {re.escape(os.getcwd())}$"
    for source in ("text:mine.txt", "text:no/*.txt", "jsonl:../mine.jsonl"):
        with pytest.raises(UserError, match=f"names no (text|jsonl) file: {here}"):
            source_files(DataConfig(source=source))
    with pytest.raises(UserError, match="names no text file"):
        found(tmp_path, ".")
    assert re.search("has 1 file of other ends .* .the first: .*a.log", capsys.readouterr().out)
    with pytest.raises(UserError, match="data.source: .* names no parquet file"):
        found(tmp_path, source=f"parquet:{tmp_path}/*.parquet")


@FULL
def test_a_folder_of_an_object_store_gives_the_same():
    with s3_server():
        address = f"s3://{BUCKET}/folder"
        files = store_of(ObjectPath(address))
        names = ["a.txt", "b/c.txt", ".d/e.txt", "b/.f.txt"]
        for name in names:
            files.pipe_file(f"{address}/{name}", b"text")
        for pattern in (address, f"{address}/**/*.txt", f"{address}/**"):
            given = matching_files(pattern, "text", "data.source")
            assert [str(file) for file in given] == [f"{address}/{name}" for name in names[:2]]


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
    (tmp_path / "a.parquet").write_bytes(b"x")
    source = source.format(tmp_path / "a.parquet")
    needed = f"needs the package {package}: {install_command('data')}"
    with pytest.raises(UserError, match=re.escape(needed)):
        prepare_shards(DataConfig(source, path=str(tmp_path / "shards")).resolve())
