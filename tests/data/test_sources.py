"""What a run says of data that are not what they were: sources, settings, shards being read."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen_here,
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    write_config,
    write_text,
)
from torchmars.commands import prepare
from torchmars.core.errors import UserError
from torchmars.data import sources
from torchmars.data.windows import ChangedData, Windows
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


def disturbed(tables, at, disturb, on_rank):
    """Train; before step `at` this rank disturbs the data if it is `on_rank`. What it said."""

    def change(trainer):
        train_step = trainer.train_step

        def step():
            if trainer.state.step + 1 == at and trainer.layout.world.rank == on_rank:
                DISTURBANCES[disturb](Path(tables["data"]["path"]))
            return train_step()

        trainer.train_step = step

    return listen_here(tables, change)


def disturbed_by_all(tables):
    """Train once for each disturbance in turn."""
    said = []
    for disturb, run in tables.items():
        read = Windows.read
        said.append(disturbed(run, 4, disturb, int(disturb == "seen by one")))
        Windows.read = read
    return said


def seen_by_one(folder):
    def refuse(self, shard, begin, end):
        raise ChangedData("the data changed: train-00000-000.bin was altered, one rank says")

    Windows.read = refuse


def zeroed(name):
    def zero(folder):
        size = (folder / name).stat().st_size
        (folder / name).write_bytes(bytes(size))

    return zero


DISTURBANCES = {
    "zeros": zeroed("train-00000-000.bin"),
    "cut": lambda folder: os.truncate(folder / "train-00000-000.bin", 10),
    "gone": shutil.rmtree,
    "seen by one": seen_by_one,
    "validation": zeroed("validation-00000-000.bin"),
}


def test_a_run_ends_with_one_line_on_every_rank_when_its_shards_change(tmp_path):
    """And nothing that was made of the changed tokens is reported or saved."""
    write_text(tmp_path)
    settings = {
        "training": {"steps": 8},
        "checkpoint": {"interval": 3},
        "validation": {"interval": 6, "windows": 4},
    }
    runs = {
        name: tiny_tables(
            tmp_path, run={"name": name}, data={"path": str(tmp_path / name)}, **settings
        )
        for name in DISTURBANCES
    }
    for rank in run_ranks(disturbed_by_all, 2, runs):
        for name, said in zip(runs, rank):
            assert said.count("error: the data changed") == said.count("error") == 1, (name, said)
            assert f"{'validation' if name == 'validation' else 'train'}-00000-000.bin" in said
    for name, tables in runs.items():
        losses = metrics(tables)
        assert list(losses) == list(range(1, 7 if name == "validation" else 4))
        assert min(losses.values()) > 1
        found = run_folder_of(tables) / "checkpoints"
        assert [path.name for path in found.iterdir()] == ["step-00000003"]
