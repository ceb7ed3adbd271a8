"""A folder and the globs of it give the same files, and say what they leave out."""

import os

import pytest

from tests.support.full import FULL
from tests.support.store import BUCKET, s3_server
from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.core.places import ObjectPath
from torchmars.data.corpus import source_files
from torchmars.data.files import FoundFiles, matches
from torchmars.storage.objects import store_of

DATA = ["a.txt", "deep/b.txt", "deep/er/c.txt", "deep/README.txt", "notes_/tmp.txt", "x~y/d.txt"]
LEFT = [
    ".hidden.txt",
    "._a.txt",
    ".ipynb_checkpoints/a-checkpoint.txt",
    "deep/.git/d.txt",
    ".cache/huggingface/download/a.txt",
    "__MACOSX/a.txt",
    "deep/__MACOSX/deep/a.txt",
    "_temporary/0/part-0.txt",
    "_delta_log/0.txt",
    "README.txt",
    "LICENSE.txt",
    "~$a.txt",
]
# A glob that ends as anything is given more than a folder.
ALSO = [
    "a.txt~",
    "#a.txt#",
    "a.txt.swp",
    "a.txt.part",
    "_SUCCESS",
    ".a.txt.crc",
    "a.bak",
]


def written(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text {name}")


def found(folder, pattern="", kind="text"):
    files = matches(str(folder / pattern) if pattern else str(folder), kind, "data.source").told()
    return [str(file.relative_to(folder)) for file in files]


def test_a_folder_and_its_globs_give_the_same_and_what_is_left_out_is_said(tmp_path, capsys):
    written(tmp_path, DATA + LEFT)
    assert found(tmp_path) == found(tmp_path, "**/*.txt") == sorted(DATA)
    folder, pattern = capsys.readouterr().out.splitlines()
    assert folder == pattern and f"left out {len(LEFT)} files" in folder
    assert f"(the first: {tmp_path}/._a.txt)" in folder
    written(tmp_path, ALSO)
    assert found(tmp_path) == found(tmp_path, "**") == found(tmp_path, "**/*") == sorted(DATA)
    folder, pattern, same = capsys.readouterr().out.splitlines()
    assert pattern == same
    assert f"left out {len(LEFT)} files" in folder
    assert f"left out {len(LEFT + ALSO)} files" in pattern


@pytest.mark.full
def test_hidden_files_are_those_that_datasets_leaves_out(tmp_path):
    from datasets.data_files import resolve_pattern

    hidden = [name for name in LEFT if "/." in f"/{name}" or "__" in name]
    written(tmp_path, DATA + hidden)
    theirs = resolve_pattern(f"{tmp_path}/**/*.txt", "")
    assert sorted(os.path.relpath(name, tmp_path) for name in theirs) == found(tmp_path)


def test_what_is_asked_for_is_read(tmp_path, capsys):
    written(tmp_path, ["a.txt", ".b/c.txt", "d.txt~", "README.txt", "_delta_log/e.txt"])
    for pattern, expected in {
        ".b": [".b/c.txt"],
        ".b/*.txt": [".b/c.txt"],
        "*/*.txt": None,
        ".*/*.txt": [".b/c.txt"],
        "*~": ["d.txt~"],
        "d.txt~": ["d.txt~"],
        "README.*": ["README.txt"],
        "_delta_log/*": ["_delta_log/e.txt"],
    }.items():
        if expected is None:
            with pytest.raises(UserError, match="names no text file, but .*/.b/c.txt: name that"):
                found(tmp_path, pattern)
        else:
            assert found(tmp_path, pattern) == expected, pattern
    assert capsys.readouterr().out == ""
    config = DataConfig("text", files=[str(tmp_path), str(tmp_path / ".b" / "c.txt")])
    assert tmp_path / ".b" / "c.txt" in source_files(config)


def test_a_file_that_several_links_lead_to_is_read_once(tmp_path, capsys):
    """In a folder of a hub's cache, all files are links to what holds their content."""
    written(tmp_path, ["blobs/0", "one/a.txt", "one/other.txt"])
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "b.txt").symlink_to("../blobs/0")
    (tmp_path / "two" / "b.txt").symlink_to("../blobs/0")
    os.link(tmp_path / "one" / "a.txt", tmp_path / "one" / "hard.txt")
    expected = ["one/a.txt", "one/b.txt", "one/other.txt"]
    for pattern in ("", "*/*.txt"):
        assert found(tmp_path, pattern) == expected
        assert (
            "left out 2 links to files that are read under another name" in capsys.readouterr().out
        )
    files = [str(tmp_path / name / "b.txt") for name in ("one", "two")]
    assert source_files(DataConfig("text", files=files)) == [tmp_path / "one" / "b.txt"]


def test_links_in_circles_end_and_folders_by_link_are_read(tmp_path):
    written(tmp_path, ["here/a.txt", "there/b.txt"])
    for number in range(3):  # a walk of all paths would take 3 ** 40 steps
        (tmp_path / "here" / f"up{number}").symlink_to("..")
        (tmp_path / "there" / f"self{number}").symlink_to(f"self{number}")
    (tmp_path / "here" / "other").symlink_to("../there")
    expected = ["a.txt", "other/b.txt"]
    assert found(tmp_path / "here") == [*expected[:1], "other/b.txt"]
    assert found(tmp_path / "here", "**/*.txt") == found(tmp_path / "here") == expected
    (tmp_path / "here" / "gone.txt").symlink_to("nowhere")
    assert tmp_path / "here" / "gone.txt" in source_files(DataConfig(f"text:{tmp_path}/here"))


@pytest.fixture
def address():
    """A folder of an object store."""
    with s3_server():
        yield f"s3://{BUCKET}/folder"


@FULL
def test_a_folder_of_an_object_store_gives_the_same(address, capsys):
    names = DATA + LEFT
    files = store_of(ObjectPath(address))
    for name in names:
        files.pipe_file(f"{address}/{name}", b"text")
    expected = [f"{address}/{name}" for name in sorted(set(names) - set(LEFT))]
    for pattern in (address, f"{address}/**/*.txt", f"{address}/**"):
        found = matches(pattern, "text", "data.source").told()
        assert [str(file) for file in found] == expected, pattern
        assert f"left out {len(LEFT)} files" in capsys.readouterr().out


def test_files_of_one_number_on_their_mount_are_no_links(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    stat = os.stat

    def without_numbers(path, *args, **options):
        found = list(stat(path, *args, **options))
        found[1] = 0  # st_ino
        return os.stat_result(found)

    files = {tmp_path / f"{name}.txt" for name in "abc"}
    with monkeypatch.context() as mount:
        mount.setattr(os, "stat", without_numbers)
        found = FoundFiles(files).once()
    assert found == sorted(files)


def test_a_readme_that_is_all_there_is_is_read(tmp_path):
    (tmp_path / "README.md").write_text("x")
    assert matches(f"{tmp_path}/*.md", "text", "x").once() == [tmp_path / "README.md"]
