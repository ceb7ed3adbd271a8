"""This process among all ranks, by the variables that torchrun and SLURM set.

They are known before the ranks connect.
"""

import os
import socket
from datetime import timedelta

import torch

from torchmars.cluster.environment import Environment, read_variable
from torchmars.core.errors import UserError


def rank() -> int:
    """Return this process's number among all ranks; 0 for a process that was started alone."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks; 1 for a process that was started alone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def machines() -> int:
    """Return the number of machines, each of which has a launcher."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def local_rank() -> int:
    """Return this process's number among those of its machine; 0 for a process started alone."""
    return int(os.environ.get("LOCAL_RANK", 0))


def node() -> str:
    """Return the name of this machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_rank() -> int | None:
    """Return the number that this machine was given; None if the machines are to find out."""
    number = os.environ.get("NODE_RANK")
    return None if number is None else read_variable("NODE_RANK", number)


def start_timeout() -> timedelta:
    """Return how long ranks wait for each other at the start."""
    default = str(Environment.RDZV_TIMEOUT)
    seconds = read_variable("RDZV_TIMEOUT", os.environ.get("RDZV_TIMEOUT", default))
    return timedelta(seconds=seconds)


def check_devices(local_ranks: int | None = None) -> None:
    """Raise `UserError` if this machine has GPUs, but fewer than ranks.

    `local_ranks` is the number of ranks on it, by default that of torchrun.
    """
    local_ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_ranks:
        raise UserError(
            f"{local_ranks} ranks need as many GPUs, {node()} has {gpus}: "
            f"set NGPU to at most {gpus}"
        )
