"""SLURM's variables on the job of this process.

It is all that ranks and commands know of a scheduler: run_train.sh starts jobs, and
comparison/slurm.py submits trials.
"""

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torchmars.core.bounds import Range
from torchmars.core.typed import whole_number

# The variables of a job, instead of one of run_train.sh's that is not set.
VARIABLES = {"NNODES": "SLURM_JOB_NUM_NODES", "NGPU": "SLURM_GPUS_ON_NODE"}
# run_train.sh's variable with the endpoint of a job for which nobody has set one.
JOB_ENDPOINT = "TORCHMARS_JOB_ENDPOINT"
CORES, JOB, NODE = "SLURM_CPUS_ON_NODE", "SLURM_JOB_ID", "SLURMD_NODENAME"
ARRAY, RESTARTS = "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"
LOOK_SECONDS, UNNOTICED_SECONDS = 5.0, 900.0


def in_batch_job(variables: Mapping[str, str]) -> bool:
    """Return whether this is the script or a step of a job, and not started by hand."""
    return bool(variables.get(JOB)) and variables.get("ENVIRONMENT") == "BATCH"


def of_elastic_job(variables: Mapping[str, str]) -> bool:
    """Return whether this is part of a job that goes on without its lost nodes, by NNODES=MIN:MAX.

    Its machines meet at the node of its script.
    """
    elastic = ":" in variables.get("NNODES", "") and JOB_ENDPOINT in variables
    return in_batch_job(variables) and elastic


def array_of_machines(variables: Mapping[str, str]) -> str | None:
    """Return the number of the array whose jobs are the machines of one run; None for other jobs.

    That is an array which NNODES=MIN:MAX was given. SLURM puts a job of it back into the queue when
    its node is lost, and it may join the run again, which a node of one job cannot.
    """
    elastic = ":" in variables.get("NNODES", "")
    return variables.get(ARRAY) if in_batch_job(variables) and elastic else None


def requeue_without_script(variables: Mapping[str, str]) -> None:
    """Put the job of this process back into the queue once the node of its script is lost.

    `sbatch --no-kill` keeps such a job, in which nothing runs any more. SLURM notices later than
    the machines do, by default after 300 s: the function looks for `UNNOTICED_SECONDS`. A job that
    may not come back is cancelled.
    """
    job, deadline = variables[JOB], time.monotonic() + UNNOTICED_SECONDS
    while time.monotonic() < deadline:
        told = dict(
            re.findall(r"\b(JobState|BatchHost|NodeList)=(\S+)", scontrol("show", "job", job))
        )
        first, nodes = told.get("BatchHost"), told.get("NodeList", "")
        if told.get("JobState") != "RUNNING" or first == variables.get(NODE):
            return
        if first not in scontrol("show", "hostnames", nodes).split():
            scontrol("requeue", job)
            scontrol("update", f"JobId={job}", f"NumNodes={variables.get(VARIABLES['NNODES'])}")
            subprocess.run(["scancel", "--state=RUNNING", job], capture_output=True)
            return
        time.sleep(LOOK_SECONDS)


def scontrol(*words: str) -> str:
    """Return what SLURM's command prints; nothing where it fails."""
    return subprocess.run(["scontrol", *words], capture_output=True, text=True).stdout


@dataclass
class TaskArray:
    """The numbers of the tasks of an array, of which each is `step` more than the one before."""

    first: Annotated[int, Range(0, 2**31)]
    step: Annotated[int, Range(1, 2**31)]
    count: Annotated[int, Range(1, 2**31)]

    def place(self, number: int) -> int | None:
        """Return which of the tasks, from 0, has a number; None if none has."""
        place, rest = divmod(number - self.first, self.step)
        return place if 0 <= place < self.count and not rest else None

    @property
    def last(self) -> int:
        """The highest number."""
        return self.first + (self.count - 1) * self.step


def task_of_array(variables: Mapping[str, str]) -> tuple[int, TaskArray | None] | None:
    """Return the number of this task of an array, and the array; None for another process.

    The array is None if its numbers do not follow each other: SLURM tells only the lowest, the
    highest, and how many there are.
    """
    count = number_of(variables, "SLURM_ARRAY_TASK_COUNT", 0)
    if count < 1:
        return None
    first = number_of(variables, "SLURM_ARRAY_TASK_MIN", 0)
    step = max(1, number_of(variables, "SLURM_ARRAY_TASK_STEP", 1))
    array = TaskArray(first, step, count)
    whole = number_of(variables, "SLURM_ARRAY_TASK_MAX", array.last) == array.last
    return number_of(variables, "SLURM_ARRAY_TASK_ID", 0), array if whole else None


def task_of_step(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this task of a step, and how many there are; 0 of 1 for others.

    A batch script outside a step is one process, however many tasks its job has.
    """
    count = number_of(variables, "SLURM_STEP_NUM_TASKS", 1)
    return number_of(variables, "SLURM_PROCID", 0), count


def number_of(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number that a variable has, or else the default."""
    value = whole_number(variables.get(name, ""))
    return value if isinstance(value, int) else default
