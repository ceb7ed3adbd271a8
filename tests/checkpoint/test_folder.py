"""A run's folder of checkpoints: only what runs make is deleted, and of a link the link alone."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.storages import keep_on
from tests.support.tiny import listen_here, metrics, run_folder_of, tiny_tables, write_text
from torchmars.checkpoint.folder import (
    check_place,
    checkpoints,
    delete_all,
    leftovers,
    step_of,
)
from torchmars.checkpoint.resume import read_verified
from torchmars.core import files
from torchmars.core.errors import UserError
from torchmars.core.places import place
from torchmars.storage.local import LOCAL, FileOwner, LocalStorage


def full_folder(path):
    path.mkdir(parents=True)
    (path / "precious").write_text("x")
    return path


def whole(path):
    return (path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    "name",
    [
        "step-00000004",
        "step-00000004.partial",
        "step-00000004.damaged",
        "step-00000004.deleted",
        "step-00000004-1.partial",
    ],
)
def test_of_a_link_the_link_alone_is_deleted(tmp_path, name):
    there = full_folder(tmp_path / "larger" / "disk")
    (tmp_path / name).symlink_to(there, target_is_directory=True)
    LOCAL.delete(tmp_path / name)
    assert whole(there) and os.listdir(tmp_path) == ["larger"]
    (tmp_path / name).mkdir()
    (tmp_path / name / "__0_0.distcp").symlink_to(there / "precious")
    LOCAL.delete(tmp_path / name)
    assert whole(there) and os.listdir(tmp_path) == ["larger"]


@pytest.mark.parametrize("name", ["step-00000004", "step-00000004.partial"])
@pytest.mark.parametrize("theirs", ["notes.txt", "export/model.safetensors", "__0_0.distcp/x"])
def test_what_no_save_wrote_stays(tmp_path, name, theirs):
    """Also in a folder that is deleted: all else of it goes."""
    checkpoint = tmp_path / name
    (checkpoint / theirs).parent.mkdir(parents=True)
    (checkpoint / theirs).write_text("x")
    for own in (".metadata", "manifest.json", "__1_0.distcp", "manifest.json.partial"):
        (checkpoint / own).write_text("own")
    first = theirs.partition("/")[0]
    said = []
    [stuck] = delete_all([checkpoint], said.append)
    assert stuck == checkpoint and f"it holds {first}, which no save wrote: move that" in said[0]
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) == 1 and left[0].read_text() == "x" and left[0].match(theirs)
    shutil.rmtree(left[0].parents[theirs.count("/")])
    assert leftovers(tmp_path) == []


def test_what_another_has_deleted_is_gone(tmp_path):
    """A prune beside a run deletes what the run is about to delete."""
    gone = [tmp_path / "step-00000004", tmp_path / "step-00000006.deleted"]
    assert delete_all(gone, warn=pytest.fail) == []


def run_owner(run):
    """This process as the owner of a run's own folder."""
    return FileOwner(run / "lock", "training")


def take(folder, run):
    """Take a folder of checkpoints for the run of the folder `run`, whose lock comes first."""
    return LOCAL.take(folder, run, run_owner(run).id)


@contextlib.contextmanager
def another_run(folder, run):
    """Let another process have a folder of checkpoints for the run of the folder `run`."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        with contextlib.suppress(BaseException):
            held = run, take(folder, run)
            os.write(write, b"x")
            code = 0 if held and signal.pause() else 0
        os._exit(code)
    os.close(write)
    assert os.read(read, 1) == b"x"
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(read)


@pytest.fixture
def soon(monkeypatch):
    """Nobody waits long."""
    monkeypatch.setattr(files, "PATIENCE", 0.2)


NAMED = {
    "as it is": lambda tmp_path: tmp_path / "there",
    "by a link": lambda tmp_path: tmp_path / "link",
    "through a link": lambda tmp_path: tmp_path / "up" / "there",
    "with steps back": lambda tmp_path: tmp_path / "x" / ".." / "there",
    "relative": lambda tmp_path: Path("there"),
    "of a run": lambda tmp_path: tmp_path / "a" / "checkpoints",
    "of a run, by a link": lambda tmp_path: tmp_path / "default",
}


@pytest.mark.parametrize("named", NAMED)
def test_a_folder_has_one_run_owner(tmp_path, monkeypatch, soon, named, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("there", "x", "a/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    for name, target in {"link": "there", "up": ".", "default": "a/checkpoints"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    first, second = tmp_path / "a", tmp_path / "b"
    its = first / "checkpoints" if named.startswith("of a run") else tmp_path / "there"
    folder = NAMED[named](tmp_path)
    with another_run(its, first):
        with pytest.raises(UserError, match="set checkpoint.folder to another folder") as told:
            take(folder, second)
        assert f"process {os.getpid()} " not in str(told.value)
    capsys.readouterr()
    taken = take(folder, second)
    taken.check(), taken.release()
    assert capsys.readouterr() == ("", "")  # whoever is dead is not waited for


def test_a_run_sees_who_has_its_default_folder(tmp_path, soon):
    default, other = (tmp_path / name / "checkpoints" for name in "ac")
    assert take(other, tmp_path / "c") is None and not other.exists()
    with another_run(default, tmp_path / "b"):
        with pytest.raises(UserError, match="set checkpoint.folder to another folder"):
            take(default, tmp_path / "a")


def test_files_of_others_in_a_folder_are_left_as_they_are(tmp_path):
    theirs = [tmp_path / name for name in ("lock", "generation", "config.toml", "owner")]
    for file in theirs:
        file.write_text("x")
    taken = take(tmp_path, tmp_path / "run")
    taken.check()
    assert checkpoints(tmp_path) == leftovers(tmp_path) == []
    taken.release()
    assert all(file.read_text() == "x" for file in theirs)


def test_where_a_run_must_not_have_its_checkpoints(tmp_path):
    other, own = tmp_path / "other", tmp_path / "own"
    for run in (other, own):
        run.mkdir()
        (run / "config.toml").touch(), (run / "lock").touch()
    (tmp_path / "link").symlink_to(other)
    for folder in (other, tmp_path / "link", tmp_path / "own" / ".." / "other"):
        with pytest.raises(UserError, match="is the folder of another run: set checkpoint.folder"):
            check_place(folder, own)
    for folder in (own, other / "checkpoints", tmp_path, tmp_path / "new"):
        check_place(folder, own)
    for name in ("step-00000004", "a/step-00000004.partial/b", "step-123456789/x"):
        for folder in (tmp_path / name, place("s3://bucket") / name):
            with pytest.raises(UserError, match="lies in a checkpoint"):
                check_place(folder, own)


def test_links_to_nothing_and_plain_files_are_deleted_too(tmp_path):
    (tmp_path / "step-00000004.partial").symlink_to(tmp_path / "nothing")
    (tmp_path / "step-00000006.deleted").write_text("a file")
    for path in leftovers(tmp_path):
        LOCAL.delete(path)
    assert os.listdir(tmp_path) == []


def test_only_names_that_runs_make_are_leftovers(tmp_path):
    made = [
        "step-00000004.damaged",
        "step-00000004.deleted",
        "step-00000004.partial",
        "step-00000006-2.partial",
        "step-123456789.partial",
    ]
    for name in (
        *made,
        "step-mine.partial",
        "step-4.partial",
        "step-00000004",
        "other.partial",
        "step-00000004.bak",
        "step-00000004.partial.bak",
        "step-00000004-x.partial",
        "step-000000004.partial",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in leftovers(tmp_path)] == made
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004"]


class Refusing(LocalStorage):
    """Lets nothing of a name be deleted, as if it were another user's."""

    def __init__(self, name):
        self.name = name

    def remove(self, path):
        if path.name == self.name:
            raise PermissionError(1, "Operation not permitted", str(path))
        LOCAL.remove(path)


def test_a_name_that_cannot_be_had_gets_a_number(tmp_path):
    checkpoint = tmp_path / "step-00000004"
    damaged = full_folder(tmp_path / "step-00000004.damaged")
    full_folder(checkpoint)
    Refusing(damaged.name).set_aside(checkpoint)
    assert whole(damaged) and whole(tmp_path / "step-00000004-1.damaged")


def test_two_saves_of_a_step_never_write_to_one_folder(tmp_path):
    first, second = (LOCAL.stage(tmp_path / "step-00000004") for _ in range(2))
    assert first != second and set(leftovers(tmp_path)) == {first, second}


def among_links(tables, there):
    """Train with links and things of others among the checkpoints; what this rank said."""
    said = listen_here(tables | {"training": tables["training"] | {"steps": 4}})
    folder = run_folder_of(tables) / "checkpoints"
    shutil.move(folder / "step-00000004", there / "step-00000004")
    (folder / "step-00000004").symlink_to(there / "step-00000004")
    for name in ("step-00000006.partial", "step-00000099.deleted"):
        (folder / name).symlink_to(there / "mine")
    (folder / "step-00000098.partial").write_text("a file")
    (folder / "step-00000008.partial").mkdir()
    (folder / "step-mine.partial").mkdir()

    def change(trainer):
        keep_on(Refusing("step-00000008.partial"))

    return said + listen_here(tables, change)


def test_a_run_goes_on_from_a_linked_checkpoint_and_saves_beside_what_it_cannot_delete(tmp_path):
    write_text(tmp_path)
    full_folder(tmp_path / "disk" / "mine")
    settings = {"interval": 2, "keep_last": 2, "keep_best": False}
    tables = tiny_tables(tmp_path, training={"steps": 12}, checkpoint=settings)
    (said,) = run_ranks(among_links, 1, tables, tmp_path / "disk")
    folder = run_folder_of(tables) / "checkpoints"
    assert "continue  from step 4" in said and list(metrics(tables)) == list(range(1, 13))
    assert said.count("warning: cannot delete") == 1
    assert "step-00000008.partial: Operation not permitted" in said
    assert "could not be written" not in said
    assert {path.name for path in folder.iterdir()} == {
        "step-00000010",
        "step-00000012",
        "step-00000008.partial",
        "step-mine.partial",
    }
    assert whole(tmp_path / "disk" / "mine")
    assert (
        read_verified(tmp_path / "disk" / "step-00000004", "full").step == 4
    )  # the link alone is gone
    assert [step_of(path) for path in checkpoints(folder)] == [10, 12]


def test_a_link_that_leads_nowhere_hides_no_checkpoint(tmp_path):
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "manifest.json").touch()
    (tmp_path / "file").touch()
    (tmp_path / "notes").symlink_to(tmp_path / "file" / "x")
    (tmp_path / "circle").symlink_to("circle")
    assert checkpoints(tmp_path) == [tmp_path / "step-00000004"]
    (tmp_path / "step-00000008").symlink_to("step-00000008")
    with pytest.raises(UserError, match="step-00000008 cannot be looked at .*: restore it"):
        checkpoints(tmp_path)
