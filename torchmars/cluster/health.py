"""What there is on a machine, for a bug report, and whether two ranks can meet on it."""

import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from torchmars.cluster.connection import keep_within_machine
from torchmars.core.device import gpu_count, gpu_name
from torchmars.core.version import __version__
from torchmars.optim.kernels import can_compile, has_triton
from torchmars.optim.matrices.precision import multiplies_bfloat16

GIB = 1 << 30
OURS = ("CUDA_", "GLOO_", "NCCL_", "NGPU", "NNODES", "OMP_", "PYTORCH_", "RDZV_END", "TORCH")
Rows = Iterator[tuple[str, str]]


def machine() -> Rows:
    """Yield versions, and the devices that torch finds."""
    cpu, memory = torch.device("cpu"), psutil.virtual_memory().total / GIB
    bfloat16 = "fast" if multiplies_bfloat16(cpu) else "slow"
    yield "torchmars", f"{__version__}, in {Path(__file__).parents[1]}"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()
    yield "torch", torch.__version__
    yield "CPU", f"{os.cpu_count()} cores, {memory:.0f} GiB, bfloat16 is {bfloat16}"
    for number in range(gpu_count()):
        yield f"GPU {number}", gpu_name(number)
    yield "compiler", "found" if can_compile(cpu) else "none, or no headers of Python: see speed.md"
    yield "Triton", "found" if has_triton() else "none"


def limits() -> Rows:
    """Yield limits of the system, and variables that change a run."""
    yield "open files", "{} of at most {}".format(*resource.getrlimit(resource.RLIMIT_NOFILE))
    for place in ("/dev/shm", tempfile.gettempdir(), os.getcwd()):
        if os.path.isdir(place):
            yield f"room in {place}", f"{shutil.disk_usage(place).free / GIB:.1f} GiB"
    for name in sorted(os.environ):
        if name.startswith(OURS):
            yield name, os.environ[name]


def packages() -> Rows:
    """Yield the versions of the packages that are required, and of each extra's."""
    extras = metadata("torchmars").get_all("Provides-Extra") or []
    for extra in ["", *(each for each in extras if each not in ("dev", "docs", "test"))]:
        found = []
        for required in requires("torchmars") or []:
            name = re.match(r"[\w-]+", required)
            if name and (
                f'extra == "{extra}"' in required if extra else "extra ==" not in required
            ):
                try:
                    found.append(f"{name[0]} {version(name[0])}")
                except PackageNotFoundError:
                    found.append(f"{name[0]} is missing")
        yield f"[{extra}]" if extra else "packages", ", ".join(found) or "of the packages above"


def meeting_problem() -> str:
    """Return why two ranks cannot add up a number on this machine; "" if they can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(meet, (f"{folder}/store",), nprocs=2)
        except Exception as error:  # whatever a rank's start or its network raises
            return str(error).strip().splitlines()[-1]
    return ""


def meet(rank: int, store: str) -> None:
    """Add up a number with the other of two ranks."""
    keep_within_machine()
    patience = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == 2
    dist.destroy_process_group()
