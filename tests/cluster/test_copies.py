"""Copies of a program that something else starts are refused: they would train apart."""

import sys

import pytest

import torchmars
from tests.support.mistakes import mistake
from torchmars import train as rank
from torchmars.cluster.environment import COPIES, check_copies
from torchmars.cluster.sizes import MinMax


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that nothing of the kind has started."""
    for name in (*COPIES, "RANK", "NNODES", "ENVIRONMENT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", COPIES)
def test_the_variable_is_named_that_says_more_than_the_machines(name):
    said = mistake(check_copies, {name: "2"})
    assert said.startswith(f"error: {name} = 2 tells of 2 processes") and f"unset {name} if" in said
    assert mistake(check_copies, {name: "1"}) == mistake(check_copies, {name: "many"}) == ""
    assert mistake(check_copies, {name: "2"}, MinMax(2, 2)) == ""
    assert bool(mistake(check_copies, {name: "16"}, MinMax(2, 2))) == (name != "WORLD_SIZE")


@pytest.mark.parametrize(
    "variables,machines",
    [
        ({"SLURM_NTASKS": "2"}, MinMax(1, 1)),  # the shell of `salloc -n2`
        ({"SLURM_STEP_NUM_TASKS": "4"}, MinMax(2, 3)),  # of which one is a spare
        ({"PET_NNODES": "2:4"}, MinMax(4, 4)),
    ],
)
def test_processes_that_are_machines_go_on(variables, machines):
    assert mistake(check_copies, variables, machines) == ""


@pytest.mark.parametrize(
    "variables,command",
    [
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "n1"}, ["train"]),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, ["train"]),
        ({"PET_NNODES": "2"}, ["train", "--prepared"]),  # without a job
        ({"MV2_COMM_WORLD_SIZE": "2"}, ["launch", "-m", "torchmars.train"]),
        ({"PMI_SIZE": "2"}, ["bench"]),
        ({"PMI_SIZE": "2"}, ["evaluate", "--text", "text.txt"]),
    ],
)
def test_commands_that_start_ranks_or_are_one(call, config, monkeypatch, variables, command):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(command[0], *command[1:], config)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {[*variables][0]} = 2 tells of 2 processes like this one")


def test_a_rank_without_a_launcher_and_a_run_in_python(config, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["rank", str(config)])
    with pytest.raises(SystemExit) as ended:
        rank.main.__wrapped__()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: OMPI_COMM_WORLD_SIZE = 2 ")
    with pytest.raises(torchmars.UserError, match="OMPI_COMM_WORLD_SIZE = 2 tells of 2"):
        torchmars.run_training(config)


def test_run_train_sh_counts_the_machines_of_a_job(call, config, monkeypatch):
    """Its variables may also be those of the step from which the job was submitted."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    job = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert call("train", "--complete", config)[0] == 75
    assert call("train", config)[0] == 2
