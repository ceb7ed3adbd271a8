"""python -m torchmars.checkpoint verify|prune, as a user runs it."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.support.commands import ROOT, run_command
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.manifest import FORMAT


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    write_text(folder)
    tables = tiny_tables(
        folder,
        training={"steps": 8},
        checkpoint={"interval": 2},
        validation={"interval": 4, "windows": 4},
    )
    train(2, tables)
    return run_folder_of(tables)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def command(*args):
    code, out, err = run_command("checkpoint", list(map(str, args)), ROOT)
    assert "Traceback" not in err
    return code, out, err


def steps(run):
    return [step_of(path) for path in checkpoints(run / "checkpoints")]


def damage(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def test_verify(run):
    code, out, _ = command("verify", run)
    assert code == 0 and out.count("good, ") == 4
    damage(run, 4)
    code, out, err = command("verify", run)
    assert (
        code == 2
        and out.count("good, ") == 3
        and "step-00000004/__0_0.distcp was altered" in out
        and "1 of 4 checkpoints are damaged" in err
    )


def test_prune(run):
    before = steps(run)
    code, out, _ = command("prune", run, "--keep_last", 1, "--dry_run")
    assert code == 0 and out.count("would delete") == 3 and steps(run) == before == [2, 4, 6, 8]
    damage(run, 8)
    (run / "checkpoints" / "step-00000010.partial").mkdir()
    (run / "checkpoints" / "step-00000010.damaged").mkdir()
    (run / "checkpoints" / "step-00000012.deleted").mkdir()
    (run / "checkpoints" / "step-mine.damaged").mkdir()
    code, out, _ = command("prune", run, "--keep_last", 1)
    assert code == 0 and steps(run) == [
        4,
        6,
        8,
    ]  # 6 is the newest good one, 4 the best by validation loss, 8 is damaged
    assert (run / "checkpoints" / "step-00000010.damaged").exists()
    assert not (run / "checkpoints" / "step-00000012.deleted").exists()
    code, out, _ = command("prune", run, "--keep_last", 1, "--damaged")
    assert code == 0 and steps(run) == [4, 6]
    assert (run / "checkpoints" / "step-mine.damaged").exists()
    assert (run / "checkpoints" / "step-00000010.partial").exists() and not (
        run / "checkpoints" / "step-00000010.damaged"
    ).exists()
    damage(run, 4)
    damage(run, 6)
    code, _, err = command("prune", run)
    assert code == 2 and "nothing was deleted" in err and steps(run) == [4, 6]


def test_a_checkpoint_of_another_version_is_named_and_never_deleted(run):
    file = run / "checkpoints" / "step-00000004" / "manifest.json"
    entries = json.loads(file.read_text())
    del entries["format"], entries["sha256"]
    file.write_text(replace(FORMAT, version=9).text(entries))
    code, out, err = command("verify", run)
    assert code == 2 and out.count("good, ") == 3 and "step-00000004: of another version" in out
    assert "of format torchmars-checkpoint-9" in out
    assert "1 of 4 checkpoints are of another version" in err and "damaged" not in out + err
    code, out, _ = command("prune", run, "--keep_last", 1, "--damaged")
    assert code == 0 and "step-00000004" not in out.replace(str(file), "")
    assert steps(run) == [4, 8]


def test_mistakes(tmp_path):
    for args, why in ((["prune", tmp_path], ""), (["verify", tmp_path / "none"], "it does not")):
        code, _, err = command(*args)
        assert code == 2 and "has no checkpoints" in err and err.count("\n") == 1
        assert why in err and err.endswith(": name one that torchmars runs lists\n")
