"""A run's folder of checkpoints: only what runs make is deleted, and of a link the link alone."""

import os
import shutil

import pytest

from tests.support.ranks import run_ranks
from tests.support.storages import keep_on
from tests.support.tiny import listen_here, metrics, run_folder_of, tiny_tables, write_text
from torchmars.checkpoint.folder import checkpoints, leftovers, step_of
from torchmars.checkpoint.resume import read_verified
from torchmars.checkpoint.storage import LOCAL, LocalStorage


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
    full_folder(tmp_path / name)
    (tmp_path / name / "link").symlink_to(there)
    LOCAL.delete(tmp_path / name)
    assert whole(there) and os.listdir(tmp_path) == ["larger"]


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
