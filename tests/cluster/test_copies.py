"""Copies of a launcher that srun starts are refused: they would train apart."""

import pytest

from tests.support.mistakes import mistake
from torchmars.cluster.environment import read_environment

TWO = {"NNODES": "2", "RDZV_ENDPOINT": "n1:29400"}
SCRIPT = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7"}  # its variables may be of another job's step


@pytest.mark.parametrize(
    "tasks,more,goes",
    [
        ("2", {}, False),
        ("1", {}, True),
        ("2", TWO, True),
        ("4", TWO, False),
        ("4", TWO | {"NNODES": "2:3"}, True),  # of which one is a spare
        ("2", SCRIPT, True),
    ],
)
def test_more_tasks_of_a_step_than_machines(tasks, more, goes):
    said = mistake(read_environment, {"SLURM_STEP_NUM_TASKS": tasks} | more)
    assert (said == "") == goes
    assert goes or said.startswith(f"error: SLURM_STEP_NUM_TASKS = {tasks}, and each of these")


def test_the_shell_of_salloc_is_one_process():
    assert mistake(read_environment, {"SLURM_NTASKS": "2"}) == ""
