"""Whole training steps on fake CUDA tensors, by a torch that knows no CUDA, on any machine.

A fake tensor has a shape, a dtype and a device, and no values: what asks for a value fails. `found`
runs steps in a process of its own, in which a stub answers for the GPU.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STUB = Path(__file__).with_name("stub.cpp")


def obstacle() -> str | None:
    """Return why there are no fake GPUs on this machine; None where there are."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "this torch has CUDA itself, and its own answers for GPUs"
    return None if shutil.which("g++") else "no g++ to compile the stub with"


def found(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a step of each case, and return what `step.Found` says of it, or its "error".

    Cases are the keyword arguments of `step.make_step`.
    """
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "stub.so")
        lib = torch_folder() / "lib"
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", str(STUB), "-o", str(stub)]
            + [f"-I{torch_folder() / 'include'}", f"-L{lib}", "-lc10", "-ltorch_cpu"],
            check=True,
        )
        # Before torch is imported: it asks once whether there is CUDA.
        before = {"LD_PRELOAD": str(stub), "LD_LIBRARY_PATH": str(lib)}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.fake_cuda.step"],
            input=json.dumps(cases),
            env=os.environ | before,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
