"""Measure where the seconds go from the SIGKILL of a rank to the end of the next step.

    python -m tests.measurements.restart_seconds [RANKS] [ROUNDS] [--section.key value ...]

The quickstart's model trains on the ranks (2) of this machine, MAX_RESTARTS = ROUNDS (5). After
some steps the last rank is killed, again and again. Each function in PARTS writes when it begins
and when it has ended; what lies between them is the part "else". Each number is the median. The
first line is the time from the start of the command, with its data prepared, to the first step.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.commands import ROOT, ranks_of

# By module: the functions that make a start, in their order.
PARTS = {
    "torchmars.train": ["main"],
    "torchmars.cluster.connection": ["open_store", "start", "check_ranks"],
    "torchmars.training.build": [
        "resolve_on_ranks",
        "prepare_data",
        "build_loader",
        "lay_out_model",
        "build_optimizer",
        "Checkpointer.resume",
        "open_reports",
        "Trainer.train_step",
    ],
}
HOOK = """
import functools, importlib.abc, importlib.machinery, os, sys, time

PARTS = {parts!r}
CALLS = {{}}


def wrapped(name, function):
    @functools.wraps(function)
    def call(*args, **options):
        count = CALLS[os.getpid(), name] = CALLS.get((os.getpid(), name), 0) + 1
        if name == "Trainer.train_step" and count > 3:
            return function(*args, **options)
        tell(name, "begin")
        try:
            return function(*args, **options)
        finally:
            tell(name, "end")
    return call


def tell(name, what):
    line = f"{{time.time()}} {{os.environ.get('RANK', '-')}} {{name}} {{what}}\\n"
    descriptor = os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PARTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            for each in PARTS[name]:
                owner, _, last = each.rpartition(".")
                place = getattr(module, owner) if owner else module
                setattr(place, last, wrapped(each, getattr(place, last)))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


def main() -> None:
    """Print the medians of all parts, in seconds."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), ranks, rounds, sys.argv[3:])
    first, restarts = times[0], times[1:]
    print(f"{ranks} ranks; from the command to the end of the first step: {first['total']:.2f} s")
    for name in first:
        values = [each[name] for each in restarts]
        print(f"{name:40} {statistics.median(values):6.2f}   {sorted(round(v, 2) for v in values)}")


def measure(folder: Path, ranks: int, rounds: int, options: list[str]) -> list[dict[str, float]]:
    """Return the seconds of each part of the first start, and of each one after a kill."""
    file = folder / "times"
    (folder / "sitecustomize.py").write_text(HOOK.format(parts=PARTS, file=str(file)))
    command = [str(ROOT / "run_train.sh"), "--run.folder", str(folder / "runs"), "--data.path"]
    command += [str(folder / "data"), "--training.steps", "100000", "--validation.interval", "0"]
    command += options
    path = f"{folder}{os.pathsep}{ROOT}"
    environment = os.environ | {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["MAX_RESTARTS"] = str(rounds)
    prepare = [sys.executable, "-m", "torchmars", "train", "--prepare", "quickstart.toml"]
    subprocess.run([*prepare, *command[1:]], env=environment, check=True, capture_output=True)
    file.unlink(missing_ok=True)
    began = time.time()
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    found = []
    try:
        for _ in range(rounds + 1):
            wait_for(file, ranks)
            found.append(parts_of(file, began))
            time.sleep(3)
            file.unlink()
            victim = ranks_of(launcher.pid)[-1]
            began = time.time()
            os.kill(victim, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait()
        time.sleep(2)
    return found


def wait_for(file: Path, ranks: int) -> None:
    """Wait until all ranks have made a step."""
    while not file.exists() or file.read_text().count("train_step end") < 3 * ranks:
        time.sleep(0.05)


def parts_of(file: Path, began: float) -> dict[str, float]:
    """Return the seconds of each part on the first rank, since `began`."""
    seconds: dict[str, float] = {}
    at, inside = began, {}
    for line in file.read_text().splitlines():
        when, rank, name, what = line.split()
        if rank != "0" or "total" in seconds:
            continue
        if what == "begin":
            inside[name] = float(when)
            if name == "main":
                seconds["until main of train"] = float(when) - began
                at = float(when)
            elif name not in seconds:
                seconds[f"before {name}"] = float(when) - at
        elif name in inside:
            seconds[name] = float(when) - inside[name]
            at = float(when)
            if name == "Trainer.train_step":
                seconds["total"] = float(when) - began
    return seconds


if __name__ == "__main__":
    main()
