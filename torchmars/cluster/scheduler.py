"""SLURM's variables on the job of this process: all that ranks and commands know of it."""

from collections.abc import Mapping

from torchmars.core.check import read_word

# The variables of a job, instead of one of run_train.sh's that is not set.
VARIABLES = {"NNODES": "SLURM_JOB_NUM_NODES", "NGPU": "SLURM_GPUS_ON_NODE"}
JOB, NODE = "SLURM_JOB_ID", "SLURMD_NODENAME"
PARTS, TASKS = "SLURM_HET_SIZE", "SLURM_STEP_NUM_TASKS"


def in_batch_job(variables: Mapping[str, str]) -> bool:
    """Return whether this is the script or a step of a job, and not started by hand."""
    return bool(variables.get(JOB)) and variables.get("ENVIRONMENT") == "BATCH"


def task_of_array(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return which task of an array this is, from 0, and how many there are; None for others.

    Each is one of one, which does all that is left, if their numbers do not follow each other.
    """
    count = number_of(variables, "SLURM_ARRAY_TASK_COUNT", 0)
    if count < 1:
        return None
    first = number_of(variables, "SLURM_ARRAY_TASK_MIN", 0)
    step = max(1, number_of(variables, "SLURM_ARRAY_TASK_STEP", 1))
    last = first + (count - 1) * step
    if number_of(variables, "SLURM_ARRAY_TASK_MAX", last) != last:
        return 0, 1
    return (number_of(variables, "SLURM_ARRAY_TASK_ID", first) - first) // step, count


def task_of_step(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this task of a step, and how many there are; 0 of 1 for others."""
    count = number_of(variables, TASKS, 1)
    return number_of(variables, "SLURM_PROCID", 0), count


def number_of(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number that a variable has, or else the default."""
    value = read_word(variables.get(name, ""), int)
    return value if isinstance(value, int) else default
