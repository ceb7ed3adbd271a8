"""Whether a machine has what torch.compile and the kernels by Triton need."""

import shutil
import sys
import sysconfig
from types import ModuleType

import pytest
import torch

from torchmars.optim.compiling import can_compile, has_launches

launches = pytest.importorskip("torchmars.optim.gpu.launches")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this a machine with these things: headers of Python, compilers, a GPU, Triton."""

    def make(headers=True, compilers=("gcc", "g++"), capability=(9, 0), triton=True):
        (tmp_path / "Python.h").unlink(missing_ok=True)
        if headers:
            (tmp_path / "Python.h").touch()
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton") if triton else None)

    return make


def test_a_whole_machine_can_compile(machine):
    machine()
    assert can_compile(CPU) and can_compile(GPU)


@pytest.mark.parametrize(
    "lacks,cpu",
    [
        ({"headers": False}, False),
        ({"compilers": ()}, False),
        ({"capability": (6, 1)}, True),
        ({"triton": False}, True),
    ],
    ids=str,
)
def test_a_gpu_needs_headers_a_compiler_and_triton(machine, lacks, cpu):
    machine(**lacks)
    assert not can_compile(GPU) and can_compile(CPU) == cpu


@pytest.mark.parametrize(
    "capability,kernels,in_float64",
    [
        ((7, 5), False, False),
        ((8, 0), True, True),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
        ((10, 3), True, False),
        ((12, 0), True, False),
    ],
)
def test_a_gpu_has_kernels_if_it_computes_in_bfloat16(machine, capability, kernels, in_float64):
    machine(capability=capability)
    assert has_launches(GPU) == kernels and not has_launches(CPU)
    assert launches.sums_in_float64(GPU) == in_float64
