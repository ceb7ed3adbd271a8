"""The machine, runs and their ends, and the tests that need a GPU."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpu.device import DEVICE, ON_GPU, sized
from tests.support import commands
from tests.support.tiny import tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.config.load import config_from_tables
from torchmars.optim.compiling import can_compile
from torchmars.records.gpus import GIB

FAILS = """
import torch
from torchmars.parallel.parallel_model import ParallelModel

original, calls = ParallelModel.backward, []

def backward(self, *args, **options):
    calls.append(1)
    if len(calls) == 4:
        {line}
    return original(self, *args, **options)

ParallelModel.backward = backward
"""
ENDS = {
    "an exception": 'raise RuntimeError("as asked for")',
    "out of memory": "torch.empty(2**50, dtype=torch.uint8, device=self.device)",
}


def machine() -> Iterator[dict[str, Any]]:
    """Yield what the machine is and has."""
    yield {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "memory, GiB": torch.cuda.get_device_properties(0).total_memory / GIB if ON_GPU else None,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": torch.cuda.nccl.version() if ON_GPU else None,
        "Python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "C compiler": shutil.which("gcc"),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "can compile": can_compile(DEVICE),
    }


def start(file: Path, *args: str, **environment: str) -> Any:
    """Start one rank: by ./run_train.sh on a GPU, and without importing torch again in small."""
    if ON_GPU:
        return commands.start(file, *args, NGPU="1", **environment)
    return commands.start_run(file, *args, ranks=1, NGPU="1", **environment)


def ended(process: Any, expected: int | None) -> dict[str, Any]:
    """Wait for a run; return how it ended."""
    began = time.monotonic()
    out, err = process.communicate(timeout=180)
    last = [line for line in (out + err).splitlines() if line.strip()][-1:]
    return {
        "exit code": process.returncode,
        "expected": expected,
        "s": time.monotonic() - began,
        "last line": last[0][:200] if last else "",
    }


def endings() -> Iterator[dict[str, Any]]:
    """Yield how runs end: by themselves, by SIGTERM and resumed, and by errors of a rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        tables = tiny_tables(
            folder,
            training=sized({}, {"global_batch_size": 2}),
            checkpoint={"interval": 10},
        )
        file = folder / "tiny.toml"
        write_config(config_from_tables(tables, "of this measurement"), file)
        yield {"run": "20 steps", **ended(start(file), 0)}
        process = start(file, "--training.steps", "1_000_000")
        for line in process.stdout:
            if re.search(r"checkpoint .*step-", line):
                break
        process.send_signal(signal.SIGTERM)
        yield {"run": "stopped by SIGTERM", **ended(process, 75)}
        steps = newest_step(folder) + 5
        yield {"run": "resumed", **ended(start(file, "--training.steps", str(steps)), 0)}
        for what, line in ENDS.items():
            (folder / "sitecustomize.py").write_text(FAILS.format(line=line))
            path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            process = start(file, "--training.steps", str(steps + 100), PYTHONPATH=path)
            yield {"run": what, **ended(process, 1)}


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of the runs in a folder."""
    [run] = folder.glob("runs/*")
    return step_of(checkpoints(run / "checkpoints")[-1])


def tests() -> Iterator[dict[str, Any]]:
    """Yield the outcome of each test that needs a GPU. Without one they are all skipped."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "0",
        "-vv",
        "-rA",
        "tests/gpu",
    ]
    process = subprocess.Popen(
        [*command, "-o", "faulthandler_timeout=120", *sized([], ["--collect-only"])],
        stdout=subprocess.PIPE,
        text=True,
        cwd=commands.ROOT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if outcome := re.match(r"(tests/\S.*?)\s+(PASSED|FAILED|ERROR|SKIPPED)", line):
            yield {"test": outcome[1], "outcome": outcome[2]}
        elif re.match("E  |FAILED|ERROR", line):
            yield {"line": line.strip()[:300]}
    yield {"tests": "all", "exit code": process.wait()}
