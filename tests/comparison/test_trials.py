"""How far a trial is, by its own files."""

import json
from dataclasses import replace

import pytest

from tests.support.tiny import tiny_config, write_config
from torchmars.comparison.study import Trial
from torchmars.comparison.trials import (
    delete_checkpoints,
    forget_failure,
    last_error,
    read_trial,
    write_trial,
)
from torchmars.core.errors import UserError
from torchmars.records.events import EventLog
from torchmars.records.lines import last_step


@pytest.fixture
def trial(tmp_path):
    """A trial of 20 steps whose run has begun."""
    config = tiny_config(tmp_path, checkpoint={"at_end": False})
    config.run.path.mkdir(parents=True)
    write_config(config, config.run.path / "config.toml")
    return Trial("tiny", "adamw", {"lr": 1e-3}, config)


def report(trial, step, loss):
    with (trial.folder / "metrics.jsonl").open("a") as file:
        row = {"step": step, "validation/loss": loss}
        file.write(json.dumps(row) + "\n" + '{"step": 19, "cut sh')


@pytest.mark.parametrize("name", ["output.log", "trial.toml.partial", "logs"])
def test_a_link_where_its_output_goes_is_refused(trial, tmp_path, name):
    (trial.folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=f"{name} is a link, and the run writes there"):
        write_trial(trial)
    assert not (tmp_path / "mine").exists()


def test_the_last_validation_ends_it(trial):
    report(trial, 10, 4.0)
    assert read_trial(trial).state == "pending" and last_step(trial.folder / "metrics.jsonl") == 10
    report(trial, 20, 3.0)
    # What was cut short above is gone once a run goes on.
    file = trial.folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('{"step": 19, "cut sh', ""))
    found = read_trial(trial)
    assert (found.state, found.loss, found.folder) == ("done", 3.0, "runs/tiny")
    assert found.curve.tokens == [10 * 16 * 32, 20 * 16 * 32] and found.curve.losses == [4.0, 3.0]
    file.write_text(file.read_text().replace("3.0", "null"))
    assert read_trial(trial).state == "diverged"


def test_checkpoints_that_are_kept_must_be_there(trial, tmp_path):
    keeping = replace(trial, config=tiny_config(tmp_path, checkpoint={"at_end": True}))
    report(trial, 20, 3.0)
    assert read_trial(trial).state == "done"
    assert read_trial(keeping).state == "pending"  # killed before its only save
    checkpoints = trial.config.run.path / "checkpoints"
    (checkpoints / "step-00000010").mkdir(parents=True)
    assert read_trial(keeping).state == "pending"  # killed in its last save
    (checkpoints / "step-00000020").mkdir()
    assert read_trial(keeping).state == "done"
    for folder in checkpoints.iterdir():
        folder.rmdir()
    EventLog(trial.folder).add("complete", 20)
    assert read_trial(keeping).state == "done"  # at a start that kept none


@pytest.mark.parametrize(
    "output,reason,state",
    [
        ("step 1\nerror: the data is gone\n", "the data is gone", "pending"),
        (
            "error: rank 0 on n1 failed first; all it printed is in x.log:\nTraceback\n"
            "IndexError: 3\nit ended with exit code 1\n",
            "IndexError: 3",
            "pending",
        ),
        ("error: 10 steps were skipped: lower optimizer.lr\n", "", "diverged"),
        ("Killed\n", "Killed", "pending"),
        ("", "it printed nothing", "pending"),
    ],
)
def test_a_failure_says_why_and_is_tried_again(trial, output, reason, state):
    (trial.folder / "output.log").write_text(output)
    assert last_error(trial) == reason or not reason
    (trial.folder / "failure.txt").write_text(f"exit code 1: {last_error(trial)}\n")
    found = read_trial(trial)
    assert found.state == ("failed" if reason else "diverged")
    assert found.reason == f"exit code 1: {last_error(trial)}"
    forget_failure(trial)
    assert read_trial(trial).state == state


def test_a_failure_without_a_word_is_not_given_the_reason_of_the_one_before(trial):
    output = trial.folder / "output.log"
    output.write_text("error: the data is gone\n")
    (trial.folder / "failure.txt").write_text("exit code 1: the data is gone\n")
    forget_failure(trial)
    with output.open("a") as file:  # as a trial begins
        file.write("Killed\n")
    assert last_error(trial) == "Killed"
    assert (trial.folder / "failed.log").read_text() == "error: the data is gone\n"


def test_of_a_trial_that_is_done_only_checkpoints_go(trial):
    there = trial.config.run.path / "checkpoints"
    for file in ("step-00000020/manifest.json", "step-00000010.partial/.metadata", "notes/mine"):
        (there / file).parent.mkdir(parents=True)
        (there / file).touch()
    delete_checkpoints(trial, replace(read_trial(trial), state="diverged"))
    assert [path.name for path in there.rglob("*")] == ["notes", "mine"]
    (there / "notes" / "mine").unlink(), (there / "notes").rmdir()
    delete_checkpoints(trial, replace(read_trial(trial), state="diverged"))
    assert not there.exists()


def test_nothing_goes_behind_a_link(trial, tmp_path):
    """The folder of a comparison may be anybody's, and link to checkpoints of mine."""
    (tmp_path / "mine" / "step-00000020").mkdir(parents=True)
    (trial.config.run.path / "checkpoints").symlink_to(tmp_path / "mine")
    delete_checkpoints(trial, replace(read_trial(trial), state="diverged"))
    assert (tmp_path / "mine" / "step-00000020").exists()
