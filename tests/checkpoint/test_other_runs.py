"""Checkpoints of another run: none takes them for its own, and nothing of its own deletes them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mistakes import make_checkpoint, make_place, mistake
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import (
    checkpoints,
    folder_of,
    leftovers,
    lies_in,
    step_folder,
    step_of,
)
from torchmars.checkpoint.upkeep import Retention, prune_checkpoints
from torchmars.config.load import load_config
from torchmars.core.places import place
from torchmars.storage.storage import MANIFEST
from torchmars.training.preparation import prepare_run

THEIRS = Path("runs/tiny/checkpoints")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_place(folder)
    make_checkpoint(folder)
    return folder


@pytest.fixture(autouse=True)
def runs(made, tmp_path, monkeypatch):
    """The folder of runs of one user, who has the run tiny with a checkpoint of step 2."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    (tmp_path / "tiny.toml").write_text(
        (made / "tiny.toml").read_text().replace(str(made / "runs"), "runs")
    )
    monkeypatch.chdir(tmp_path)
    rename(step_folder(THEIRS, 2), "tiny")  # its config has run.folder as another user would


def rename(checkpoint, run, **entries):
    """Let a checkpoint be one of another run."""
    manifest = manifests.read(checkpoint)
    config = manifest.config | {"run": manifest.config["run"] | {"name": run, "folder": "runs"}}
    (checkpoint / MANIFEST).write_text(replace(manifest, config=config, **entries).text())


def copy(step, folder=THEIRS, run="tiny"):
    """Add a checkpoint of another step, of a run."""
    checkpoint = step_folder(folder, step)
    shutil.copytree(step_folder(folder, 2), checkpoint)
    manifest = manifests.FORMAT.read(checkpoint / MANIFEST, manifests.CheckpointManifest)
    (checkpoint / MANIFEST).write_text(replace(manifest, step=step).text())
    rename(checkpoint, run)
    return checkpoint


def steps(folder=THEIRS):
    return [step_of(path) for path in checkpoints(folder)]


def config_of(name, *options):
    return load_config(["tiny.toml", "--run.name", name, *options], "test")


def shared(run):
    return ["--checkpoint.folder", str(THEIRS)]


def by_a_link(run):
    (run / "checkpoints").symlink_to(THEIRS.resolve())
    return []


def one_by_a_link(run):
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000002").symlink_to(step_folder(THEIRS, 2).resolve())
    return []


def behind_a_damaged_one(run):
    (copy(3, run="b") / ".metadata").unlink()
    return shared(run)


@pytest.mark.parametrize("way", [shared, by_a_link, one_by_a_link, behind_a_damaged_one])
def test_a_run_takes_no_checkpoint_of_another(way):
    Path("runs/b").mkdir()
    options = way(Path("runs/b"))
    said = mistake(prepare_run, config_of("b", "--optimizer.lr", "0.1", *options), 2, 1)
    assert "step-00000002 is of the run tiny, not of b: put that name back, or choose" in said
    assert steps()[0] == 2
    assert mistake(prepare_run, config_of("tiny", "--optimizer.lr", "0.1", *options), 2, 1) == ""


def test_a_run_that_was_moved_goes_on():
    """A run is known by its folder where its checkpoints lie in it, and else by its name."""
    os.rename("runs/tiny", "runs/b")
    assert mistake(prepare_run, config_of("b"), 2, 1) == ""
    assert not lies_in(place("s3://bucket/runs/b"), Path("runs/b"))
    os.rename("runs/b/checkpoints", "elsewhere")
    Path("runs/b").rename("moved")
    kept = ["--checkpoint.folder", "elsewhere", "--run.folder", "."]
    assert mistake(prepare_run, config_of("tiny", *kept), 2, 1) == ""
    assert "is of the run tiny, not of moved" in mistake(
        prepare_run, config_of("moved", *kept), 2, 1
    )


@pytest.mark.parametrize("own", [True, False])
def test_retention_deletes_what_is_of_its_run(own):
    """In the run's own folder that is all, whatever its name was."""
    kept = ["--checkpoint.keep_last", "1", "--checkpoint.keep_best", "false"]
    config = config_of("tiny" if own else "b", *kept, *shared(None))
    for step, run in ((3, "b"), (4, "other"), (5, "b"), (6, "b"), (8, "other"), (9, "b")):
        copy(step, run=run)
    (step_folder(THEIRS, 5) / MANIFEST).write_text("damaged")
    Retention(config, check=lambda: None, warn=pytest.fail).tidy(6)
    assert steps() == ([6] if own else [2, 4, 6, 8])
    aside = ["step-00000008.damaged", "step-00000009.damaged"]
    assert [path.name for path in leftovers(THEIRS)] == aside[0 if own else 1 :]


def stranger(text):
    """Make the run of a stranger, with a config."""
    folder = Path("downloads/tiny")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)
    return folder


def their_config():
    return stranger(f'[checkpoint]\nfolder = "{THEIRS}"\n')


def their_link():
    folder = stranger("")
    (folder / "checkpoints").symlink_to(THEIRS.resolve())
    return folder


def their_config_and_rests():
    """They have no manifest that says whose they are."""
    for path in (*checkpoints(THEIRS), *leftovers(THEIRS)):
        path.rename(path.with_name(f"{path.name.partition('.')[0]}.damaged"))
    return their_config()


@pytest.mark.parametrize("theirs", [their_config, their_link, their_config_and_rests])
def test_the_run_of_a_stranger_prunes_nothing_of_mine(theirs, capsys):
    copy(3)
    (THEIRS / "step-00000001.deleted").mkdir()
    folder = theirs()
    before = sorted(THEIRS.iterdir())
    said = mistake(prune_checkpoints, folder, folder_of(folder), {"keep_last": 1}, True)
    assert "is not in downloads/tiny, nor are its checkpoints all of that run" in said
    assert sorted(THEIRS.iterdir()) == before
    if theirs is not their_config_and_rests:
        prune_checkpoints(THEIRS, THEIRS, {"keep_last": 1, "keep_best": False}, True)
        assert capsys.readouterr().out.startswith(f"pruning {THEIRS}\n") and steps() == [3]


def test_a_run_prunes_what_it_keeps_elsewhere():
    copy(3)
    os.rename(THEIRS, "elsewhere")
    Path("runs/tiny/config.toml").write_text('[checkpoint]\nfolder = "elsewhere"\n')
    run, options = (Path("runs/tiny"), Path("elsewhere")), {"keep_last": 1, "keep_best": False}
    copy(4, Path("elsewhere"), "other")
    assert "nor are its checkpoints all of that" in mistake(prune_checkpoints, *run, options)
    rename(step_folder(Path("elsewhere"), 4), "tiny")
    assert mistake(prune_checkpoints, *run, options) == ""
    assert steps(Path("elsewhere")) == [4]
