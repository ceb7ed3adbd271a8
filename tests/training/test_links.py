"""Links in the folders of a run: no file of somebody else is written, and people's own work."""

import shutil

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen,
    listen_here,
    metrics,
    run_folder_of,
    tiny_tables,
    write_text,
)
from torchmars.core.errors import UserError
from torchmars.core.files import lock, open_to_write, write_durably
from torchmars.storage.local import IN_USE, LOCAL

FILES = "lock events.jsonl output.log logs/rank-00000.log logs/launcher-here.log".split()
FILES += "config.toml.partial metrics.jsonl.partial owner.partial".split()
FOLDERS = "logs hang profile tokenizer".split()
MINE = "what nobody else writes"


def said_with_links(tables, theirs):
    """What runs say that have a link in their folder, by its name; its path is left out."""
    said = {}
    for number, name in enumerate([*FILES, *FOLDERS]):
        tables["run"]["name"] = f"run-{number}"
        link = run_folder_of(tables) / name
        link.parent.mkdir(parents=True)
        link.symlink_to(theirs / "folder" if name in FOLDERS else theirs / "thesis")
        said[name] = listen_here(tables).splitlines()[-1].replace(str(link), "LINK")
    return said


def test_a_run_writes_to_no_file_that_a_link_in_its_folder_leads_to(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 1}, profiler={"start": 1, "steps": 1})
    theirs = tmp_path / "theirs"
    (theirs / "folder").mkdir(parents=True)
    (theirs / "thesis").write_text(MINE)
    (said,) = run_ranks(said_with_links, 1, tables, theirs)
    line = "error: LINK is a link, and the run writes there: remove it"
    assert said == dict.fromkeys([*FILES, *FOLDERS], line)
    assert (theirs / "thesis").read_text() == MINE and not any((theirs / "folder").iterdir())


def test_links_that_people_use_go_on_working(tmp_path):
    """The folder of runs, a run's, that of its checkpoints in either place, data and a step."""
    disk = tmp_path / "disk"
    for name in ("runs", "first", "checkpoints", "kept"):
        (disk / name).mkdir(parents=True)
    (tmp_path / "runs").symlink_to(disk / "runs")
    (tmp_path / "shards").symlink_to(disk / "shards")
    (disk / "runs" / "first").symlink_to(disk / "first")
    (disk / "first" / "checkpoints").symlink_to(disk / "checkpoints")
    (tmp_path / "kept").symlink_to(disk / "kept")
    write_text(tmp_path)
    settings = {"training": {"steps": 2}, "checkpoint": {"interval": 2}}
    first = tiny_tables(tmp_path, run={"name": "first"}, **settings)
    settings["checkpoint"]["folder"] = str(tmp_path / "kept")
    second = tiny_tables(tmp_path, run={"name": "second"}, **settings)
    for tables, place in ((first, "checkpoints"), (second, "kept")):
        listen(1, tables)
        shutil.move(disk / place / "step-00000002", disk / f"{place}-step")
        (disk / place / "step-00000002").symlink_to(disk / f"{place}-step")
        tables["training"]["steps"] = 4
        assert "continue  from step 2" in listen(1, tables)
        assert list(metrics(tables)) == [1, 2, 3, 4]
        assert (disk / place / "step-00000004" / "manifest.json").is_file()
    assert (disk / "shards" / "manifest.json").is_file()


@pytest.mark.parametrize("name", [".in-use", IN_USE])
def test_a_link_among_checkpoints_is_refused(tmp_path, name):
    there = tmp_path / "theirs"
    there.mkdir()
    (there / "lock").write_text(MINE)
    link = tmp_path / "checkpoints" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(there / "lock" if name == IN_USE else there)
    with pytest.raises(UserError, match=f"{link} is .*, or set checkpoint.folder to another"):
        LOCAL.take(tmp_path / "checkpoints", tmp_path / "run", "an id")
    assert [file.name for file in there.iterdir()] == ["lock"]
    assert (there / "lock").read_text() == MINE


@pytest.mark.parametrize("target", ["thesis", "nothing", "folder"])
def test_a_lock_that_is_a_link_is_refused(tmp_path, target):
    (tmp_path / "thesis").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="lock is no lock"):
        lock(tmp_path / "lock", "training")
    assert not (tmp_path / "nothing").exists() and not (tmp_path / "thesis").read_text()


def test_a_file_is_written_in_no_other_place_whoever_writes_it(tmp_path):
    (tmp_path / "thesis").write_text(MINE)
    for name in ("metrics.jsonl.partial", "events.jsonl"):
        (tmp_path / name).symlink_to("thesis")
    with pytest.raises(OSError, match="symbolic links"):
        write_durably(tmp_path / "metrics.jsonl", "{}")
    with pytest.raises(OSError, match="symbolic links"):
        open(tmp_path / "events.jsonl", "a", opener=open_to_write)
    assert (tmp_path / "thesis").read_text() == MINE
