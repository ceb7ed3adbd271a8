"""A corpus that is larger than memory may be, and the memory that its preparation takes."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import zstandard


def prepare_and_watch(source: str, folder: Path, tokenizer: str) -> tuple[float, float, str]:
    """Prepare a corpus in a process of its own.

    Returns the peaks of memory in MiB of it and of the largest process that it starts, and what it
    printed.
    """
    options = ["--source", source, "--tokenizer", tokenizer, "--path", str(folder)]
    command = subprocess.Popen(
        [sys.executable, "-m", "torchmars", "prepare", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peaks: dict[int, float] = {}
    watcher = threading.Thread(target=watch, args=(command.pid, peaks))
    watcher.start()
    found, progress = command.communicate()
    watcher.join()
    assert command.returncode == 0, progress
    took = progress[progress.index("tokenising took") :]
    workers = [peak for pid, peak in peaks.items() if pid != command.pid]
    return peaks[command.pid], max(workers, default=0.0), took + found


def watch(pid: int, peaks: dict[int, float]) -> None:
    """Note the largest memory of a process and its children, in MiB, until it ends."""
    while psutil.pid_exists(pid):
        try:
            process = psutil.Process(pid)
            for each in [process, *process.children(recursive=True)]:
                status = Path(f"/proc/{each.pid}/status").read_text()
                peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
                peaks[each.pid] = max(peak, peaks.get(each.pid, 0.0))
        except (psutil.NoSuchProcess, OSError, IndexError):
            pass
        time.sleep(0.5)  # the system keeps the peak


def make_corpus(file: Path, size: int) -> None:
    """Write JSON lines of made-up words, `size` bytes before compression."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    with zstandard.ZstdCompressor(level=3, threads=-1).stream_writer(file.open("wb")) as stream:
        while size > 0:
            drawn = rng.choices(words, weights, k=20_000)
            for first in range(0, 20_000, 400):
                line = json.dumps({"text": " ".join(drawn[first : first + 400]), "id": size})
                size -= stream.write(line.encode() + b"\n")
