"""What SLURM's variables say of the job that this process is in.

It is all that ranks and commands know of a scheduler: run_train.sh starts jobs, and
comparison/slurm.py submits trials.
"""

from collections.abc import Mapping

from torchmars.core.typed import whole_number

# The variables of a job, in place of one of run_train.sh's that is not set.
VARIABLES = {"NNODES": "SLURM_JOB_NUM_NODES", "NGPU": "SLURM_GPUS_ON_NODE"}
CORES, JOB, NODE = "SLURM_CPUS_ON_NODE", "SLURM_JOB_ID", "SLURMD_NODENAME"


def in_batch_job(variables: Mapping[str, str]) -> bool:
    """Return whether this is the script or a step of a job, and not started by hand."""
    return bool(variables.get(JOB)) and variables.get("ENVIRONMENT") == "BATCH"


def task_of(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this task of an array, or else of a step, and how many there are.

    0 of 1 for another process. A batch script outside a step is one process, however many tasks its
    job has.
    """

    def number(name: str, default: int) -> int:
        value = whole_number(variables.get(name, ""))
        return value if isinstance(value, int) else default

    if count := number("SLURM_ARRAY_TASK_COUNT", 0):
        first, step = number("SLURM_ARRAY_TASK_MIN", 0), number("SLURM_ARRAY_TASK_STEP", 1)
        return (number("SLURM_ARRAY_TASK_ID", 0) - first) // max(1, step), count
    return number("SLURM_PROCID", 0), number("SLURM_STEP_NUM_TASKS", 1)
