"""Measure the time from the command to the end of the first step, and where it goes.

    python -m tests.measurements.first_step [FOLDER ...] [--runs N]

It starts a tiny run on 2 CPU ranks as `torchmars train` does, on shards that are there already.
Each FOLDER is another checkout of torchmars; they and this one take turns. It prints medians: of
the wall clock of each phase, as the launcher and rank 0 see it, and of the CPU seconds (user and
system) of the launcher and its ranks together, which other programs on the machine disturb less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LAST = "first step"  # the phase after which a rank ends
# This file is the launcher's and the ranks' program too. The file that one of them writes:
MARKS = "FIRST_STEP_MARKS"

marks: dict[str, float] = {"command": float(os.environ.get("FIRST_STEP_BEGAN", 0))}


def mark(name: str) -> None:
    """Note that a phase of this process is over."""
    marks[name] = time.time()


def after(module: Any, name: str, then: Callable[[], None]) -> None:
    """Call `then` after each call of the function `name` of a module or class."""
    function = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        then()
        return result

    setattr(module, name, call)


def be_launcher(config: str) -> None:
    """Do what `torchmars train CONFIG` does, with this file as the ranks' program."""
    mark("python")
    from torchmars.commands import train

    sys.argv = ["torchmars train", config]
    os.environ["NGPU"] = "2"
    from torchmars.commands import launch

    mark("imports")
    after(launch, "prepare_run", end_preparation)
    start = launch.start_ranks
    launch.start_ranks = lambda environment, settings, program, *more: start(
        environment,
        settings,
        [str(HERE)],  # ranks run this file
        *more,
    )
    train.main()


def end_preparation() -> None:
    """Leave the launcher's marks where the first rank finds them."""
    mark("preparation")
    os.environ["FIRST_STEP_LAUNCHER"] = json.dumps(marks)


def be_rank() -> None:
    """Do what `python -m torchmars.train CONFIG` does up to the end of the first step."""
    global marks
    marks = json.loads(os.environ["FIRST_STEP_LAUNCHER"])
    mark("rank: python")
    import torchmars.train as train
    from torchmars.cluster import connection
    from torchmars.training import build, trainer

    mark("rank's imports")
    after(connection, "open_store", lambda: mark("store of all ranks"))
    after(connection, "start", lambda: mark("process group"))
    after(build, "build_trainer", lambda: mark("model and data"))
    after(trainer.Trainer, "train_step", end)
    train.main()


def end() -> None:
    """Write the marks of the first rank, and end this one."""
    mark(LAST)
    if os.environ["RANK"] == "0":
        Path(os.environ[MARKS]).write_text(json.dumps(marks))
    os._exit(0)


def measure(checkout: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of each phase of a start, their sum, and CPU seconds."""
    file, path = folder / "marks.json", f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {MARKS: str(file), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    before, began = os.times(), time.time()
    subprocess.run(
        [sys.executable, str(HERE), str(folder / "run.toml")],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env=os.environ | variables | {"FIRST_STEP_BEGAN": str(began)},
    )
    now = os.times()
    times = list(json.loads(file.read_text()).items())
    phases = {name: end - start for (_, start), (name, end) in zip(times, times[1:])}
    cpu = now.children_user + now.children_system - before.children_user - before.children_system
    return phases | {"all": times[-1][1] - began, "CPU seconds": cpu}


def prepare(checkout: Path, folder: Path) -> None:
    """Write the config of a tiny run, and its shards as a checkout writes them."""
    folder.mkdir()
    (folder / "run.toml").write_text(
        f"""
        [run]
        folder = "{folder / "runs"}"
        [model]
        size = "nano"
        [data]
        source = "stdlib"
        tokenizer = "bytes"
        path = "{folder / "shards"}"
        [training]
        steps = 10
        global_batch_size = 8
        seq_len = 128
        """
    )
    subprocess.run(
        [sys.executable, "-m", "torchmars", "train", "--prepare", str(folder / "run.toml")],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    checkouts = [HERE.parents[2], *(folder.resolve() for folder in options.folders)]
    found: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {checkout: Path(scratch, str(n)) for n, checkout in enumerate(checkouts)}
        for checkout, folder in folders.items():
            prepare(checkout, folder)
        for number in range(options.runs + 1):
            for checkout, folder in folders.items():
                times = measure(checkout, folder)
                if number:  # the first one writes compiled Python, and fills the page cache
                    found[checkout].append(times)
    print("| seconds until |" + "".join(f" {checkout.name} |" for checkout in checkouts))
    print("|---" * (1 + len(checkouts)) + "|")
    for phase in found[checkouts[0]][0]:
        medians = [
            statistics.median(times.get(phase, float("nan")) for times in found[checkout])
            for checkout in checkouts
        ]
        print(f"| {phase} |" + "".join(f" {median:.2f} |" for median in medians))


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank()
    elif MARKS in os.environ:
        be_launcher(sys.argv[1])
    else:
        main()
