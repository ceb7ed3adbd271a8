"""What a run says of data that are not what they were: sources, settings, shards."""

import os
import re
import shutil
import sys
from dataclasses import replace

import pytest

from tests.support.commands import begun
from tests.support.full import FULL
from tests.support.tiny import listen, tiny_config, tiny_tables, write_config, write_text
from torchmars.commands import prepare
from torchmars.core.errors import UserError
from torchmars.data import sources
from torchmars.training.preparation import prepare_data


@pytest.fixture
def config(tmp_path):
    """A config whose corpus, two files of a folder, has been prepared."""
    (tmp_path / "books").mkdir()
    for name in ("a.txt", "b.txt"):
        shutil.move(write_text(tmp_path), tmp_path / "books" / name)
    config = tiny_config(tmp_path, data={"files": [str(tmp_path / "books")]})
    prepare_data(config)
    assert sources.warning(config.data) is None
    return config


def change_content(books):
    file = books / "a.txt"
    text, stat = file.read_text(), file.stat()
    file.write_text(text.replace("fox", "cat"))
    assert file.stat().st_size == stat.st_size
    os.utime(file, ns=(0, stat.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change,message",
    [
        (change_content, "a.txt has changed"),
        (lambda books: (books / "a.txt").write_text("other"), "a.txt has changed"),
        (lambda books: (books / "b.txt").unlink(), "b.txt is gone"),
        (lambda books: (books / "c.txt").write_text("more"), "c.txt is new"),
        (
            lambda books: [(books / f"c{n}.txt").write_text("more") for n in range(5)],
            "c2.txt is new and 2 more",
        ),
    ],
)
def test_a_corpus_that_has_changed_since_is_one_line(config, tmp_path, change, message):
    change(tmp_path / "books")
    said = sources.warning(config.data)
    assert message in said and "set data.path to a new folder" in said and "\n" not in said
    prepare_data(config)  # no mistake: a run that has begun must be able to go on


def test_a_corpus_that_was_only_touched_or_put_away_is_none(config, tmp_path):
    os.utime(tmp_path / "books" / "a.txt", (1, 1))
    assert sources.warning(config.data) is None
    shutil.rmtree(tmp_path / "books")  # shards are all that a run needs
    assert sources.warning(config.data) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"size": 1}}'])
def test_a_record_that_cannot_be_read_is_said(config, tmp_path, text):
    (tmp_path / "shards" / "sources.json").write_text(text)
    assert "sources.json cannot be read" in sources.warning(config.data)


def test_prepare_says_it(config, tmp_path, capsys, monkeypatch):
    (tmp_path / "books" / "a.txt").write_text("other")
    write_config(config, tmp_path / "config.toml")
    monkeypatch.setattr(sys, "argv", ["prepare", str(tmp_path / "config.toml")])
    prepare.main()
    assert capsys.readouterr().out.count("warning   the corpus is not what") == 1


def test_another_validation_fraction_is_refused(config, tmp_path):
    config = replace(config, data=replace(config.data, validation_fraction=0.1))
    message = "prepared with data.validation_fraction = 0.05, the config says 0.1: set it back"
    with pytest.raises(UserError, match=message):
        prepare_data(config)


def test_validation_data_that_cannot_be_read_end_the_run_on_all_ranks(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path, data={"verify": "off"}, validation={"interval": 2}, training={"steps": 2}
    )
    prepare_data(tiny_config(tmp_path, **{"data": tables["data"]}))
    os.truncate(tmp_path / "shards" / "validation-00000-000.bin", 10)
    said = listen(1, tables)
    assert said.count("error") == 1 and "validation-00000-000.bin cannot be read at byte" in said


@FULL
def test_ranks_end_when_one_of_them_cannot_read(tmp_path):
    """With file and place in a line, and with the exit code of a mistake."""
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), tmp_path / "run.toml")
    run = begun(tmp_path / "run.toml")
    os.truncate(tmp_path / "shards" / "train-00000-000.bin", 10)
    _, said = run.communicate()
    assert run.returncode == 2
    lines = [line for line in said.splitlines() if "error" in line]
    assert 1 <= len(lines) <= 2 and "Traceback" not in said  # both ranks may read there at once
    for line in lines:
        assert re.search("^error: .*train-00000-000.bin cannot be read at byte .*cut short", line)
