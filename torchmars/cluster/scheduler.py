"""SLURM's variables on the job of this process.

It is all that ranks and commands know of a scheduler: run_train.sh starts jobs, and
comparison/slurm.py submits trials.
"""

import socket
from collections.abc import Mapping

from torchmars.core.check import whole_number

# The variables of a job, instead of one of run_train.sh's that is not set.
VARIABLES = {"NNODES": "SLURM_JOB_NUM_NODES", "NGPU": "SLURM_GPUS_ON_NODE"}
CORES, JOB, NODE = "SLURM_CPUS_ON_NODE", "SLURM_JOB_ID", "SLURMD_NODENAME"
FIRST, COUNT = 20_000, 12_000  # ports below those that systems give away
RESTARTS, PARTS = "SLURM_RESTART_COUNT", "SLURM_HET_SIZE"


def in_batch_job(variables: Mapping[str, str]) -> bool:
    """Return whether this is the script or a step of a job, and not started by hand."""
    return bool(variables.get(JOB)) and variables.get("ENVIRONMENT") == "BATCH"


def task_of_array(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return which task of an array this is, from 0, and how many there are; None for others.

    Each does all that is left if their numbers do not follow each other, as where some are
    submitted again: SLURM tells only the lowest, the highest, and how many there are.
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
    """Return the number of this task of a step, and how many there are; 0 of 1 for others.

    A batch script outside a step is one process, however many tasks its job has.
    """
    count = number_of(variables, "SLURM_STEP_NUM_TASKS", 1)
    return number_of(variables, "SLURM_PROCID", 0), count


def number_of(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number that a variable has, or else the default."""
    value = whole_number(variables.get(name, ""))
    return value if isinstance(value, int) else default


def job_port(job: int) -> int:
    """Return the port at which the machines of a job meet: its own, or the next that is free.

    Without any it is the job's own, of which its first machine says that it is taken.
    """
    own = [FIRST + (job + more) % COUNT for more in range(COUNT)]
    return next((port for port in own if can_listen("", port)), own[0])


def can_listen(address: str, port: int) -> bool:
    """Return whether this machine has an address, and nothing listens on a port of it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
