"""How fast a corpus is prepared, against a bare loop of tiktoken, and in how much memory.

    python tests/measurements/prepare_corpus.py TEXT_FILE
    python tests/measurements/prepare_corpus.py --synthetic GIGABYTES

The first compares `torchmars prepare` with GPT-2's tokenizer with a loop that encodes the same
documents by `encode_ordinary_batch` on as many threads as there are cores. They take turns. The
second makes JSON lines, compressed by zstd, and prepares them once. Needs GPT-2's BPE files.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import tiktoken
import zstandard

ROUNDS = 5
CORES = len(os.sched_getaffinity(0))


def bare_loop(file: Path) -> float:
    """Return the seconds of encoding the documents of a text file."""
    encoding = tiktoken.get_encoding("gpt2")
    encoding.encode_ordinary("x")
    documents = file.read_text().split("\n<|endoftext|>\n")
    began = time.perf_counter()
    for first in range(0, len(documents), 2 * CORES):
        encoding.encode_ordinary_batch(documents[first : first + 2 * CORES], num_threads=CORES)
    return time.perf_counter() - began


def prepare(source: str, folder: Path, tokenizer: str) -> tuple[float, float, float, str]:
    """Prepare a corpus in a process of its own.

    Returns the seconds that it says it took to tokenise, the peaks of memory in MiB of it and of
    the largest process that it starts, and what it printed.
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
    seconds = float(took.split()[2].replace(",", ""))
    workers = [peak for pid, peak in peaks.items() if pid != command.pid]
    return seconds, peaks[command.pid], max(workers, default=0.0), took + found


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


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--synthetic", type=float, metavar="GIGABYTES")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.synthetic:
            file = folder / "corpus.jsonl.zst"
            make_corpus(file, int(options.synthetic * 1e9))
            _, peak, largest, said = prepare(f"jsonl:{file}", folder / "shards", "gpt2")
            print(f"{said}peak memory: {peak:.0f} MiB, largest worker {largest:.0f} MiB")
            return
        loops, ours = [], []
        for number in range(ROUNDS):
            loops.append(bare_loop(options.file))
            seconds, peak, largest, _ = prepare(
                f"text:{options.file}", folder / f"{number}", "gpt2"
            )
            ours.append(seconds)
            print(f"loop {loops[-1]:.2f} s, prepare {seconds:.2f} s", flush=True)
        size = options.file.stat().st_size / 1e6
        loop, own = statistics.median(loops), statistics.median(ours)
        print(
            f"median: loop {size / loop:.2f} MB/s, prepare {size / own:.2f} MB/s "
            f"({loop / own:.0%}) on {CORES} cores; "
            f"peak memory {peak:.0f} MiB, largest worker {largest:.0f} MiB"
        )


if __name__ == "__main__":
    main()
