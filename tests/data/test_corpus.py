"""Which files a corpus has, and where documents end."""

import pytest

from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.data.corpus import documents, source_files


def test_files_folders_and_globs(tmp_path):
    for name in ("a.txt", "b.md", "c.py", "deep/d.txt", "e.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(*patterns):
        files = source_files(
            DataConfig(source="text", files=[str(tmp_path / pattern) for pattern in patterns])
        )
        return [str(file.relative_to(tmp_path)) for file in files]

    assert found("c.py") == ["c.py"]
    assert found(".") == ["a.txt", "b.md", "deep/d.txt"]
    assert found("*.txt", "a.txt", "**/*.log") == ["a.txt", "e.log"]
    with pytest.raises(UserError, match="missing.txt' names no text file"):
        found("a.txt", "missing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="a folder gives its .txt and .md files"):
        found("empty")


def test_a_separator_line_ends_a_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo <|endoftext|> still\n<|endoftext|>\nthree\n")
    config = DataConfig(source="text", files=[str(file)])
    assert list(documents(config, file)) == ["one\ntwo <|endoftext|> still\n", "three\n"]


def test_stdlib_has_text_everywhere():
    config = DataConfig(source="stdlib")
    files = source_files(config)
    assert files == sorted(files) and len(files) > 300
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 5e6
    text = next(documents(config, next(file for file in files if file.name == "argparse.py")))
    assert "class ArgumentParser" in text
