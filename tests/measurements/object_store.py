"""Measure how fast a checkpoint goes to an object store and comes back, beside boto3 itself.

    python -m tests.measurements.object_store [MIB]

MIB (1024) is the size of the state, in 16 tensors.
The store is moto's server on the loopback, in a process of its own. One rank writes the state, and
verifies and reads it; boto3 uploads and downloads the same files, one after the other, with its own
settings. In each of 3 rounds the ways take turns. It prints medians: seconds, the rate, the time in
parts of boto3's, and memory: the most that the process had resident (VmHWM) beyond what it had
before. The server takes part of the same cores, and keeps what it has got in files.
"""

import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import boto3
import torch
import torch.distributed as dist

from tests.support.store import BUCKET, ServerProcess, variables
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.reader import read_index, read_tensors
from torchmars.checkpoint.writer import TensorWriter
from torchmars.config import Degrees
from torchmars.core.places import place
from torchmars.parallel.layout import Layout
from torchmars.storage.storage import File

ROUNDS, TENSORS = 3, 16
UP, DOWN = "uploaded by boto3", "downloaded by boto3"


def resident(name: str) -> float:
    """Return MiB of memory of this process by a name of /proc's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `work` takes, and its peak of memory in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else it would use what the way before has left
    Path("/proc/self/clear_refs").write_text("5")  # look for the peak anew from here
    before, began = resident("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - began, max(resident("VmHWM") - before, 0.0)


class Transfers:
    """The ways to move one state to the store and back."""

    def __init__(self, mib: int, folder: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        layout = Layout.create(torch.device("cpu"), Degrees())
        self.writer = TensorWriter(layout)
        numbers = mib * 2**18 // TENSORS  # of 4 bytes
        self.state = {f"tensor-{number}": torch.randn(numbers) for number in range(TENSORS)}
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.checkpoint = place(f"s3://{BUCKET}/run/step-00000001")
        self.client, self.local = boto3.client("s3"), folder / "files"
        self.local.mkdir()
        self.files: dict[str, File] = {}

    def write(self) -> None:
        self.files = self.writer.write(self.state, self.checkpoint)

    def copy(self) -> None:
        """Leave the files of the checkpoint on the disk, for boto3 to upload."""
        for name in self.files:
            key = f"run/step-00000001/{name}"
            self.client.download_file(BUCKET, key, str(self.local / name))

    def upload(self) -> None:
        for name in self.files:
            self.client.upload_file(str(self.local / name), BUCKET, f"boto3/{name}")

    def verify(self) -> None:
        manifests.verify(self.checkpoint, self.manifest(), "full")

    def read(self) -> None:
        read_tensors(self.checkpoint, self.target, read_index(self.checkpoint, self.manifest()))

    def download(self) -> None:
        for name in self.files:
            self.client.download_file(BUCKET, f"boto3/{name}", str(self.local / "down"))

    def manifest(self) -> CheckpointManifest:
        return CheckpointManifest(1, 0, 1, "", 257, {}, {}, files=self.files)

    def check(self) -> None:
        """Assert that what was read is what was written. Forget it."""
        for name, tensor in self.target.items():
            assert torch.equal(tensor, self.state[name])
            tensor.zero_()


def measure(mib: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and memory of each way in each round."""
    found = defaultdict(list)
    ways = Transfers(mib, folder)
    ways.write()  # warms up
    ways.copy()
    for _ in range(ROUNDS):
        found["written"].append(measured(ways.write))
        found[UP].append(measured(ways.upload))
        found["verified"].append(measured(ways.verify))
        found["read"].append(measured(ways.read))
        found[DOWN].append(measured(ways.download))
        ways.check()
    print(f"{mib} MiB in {len(ways.files)} files", flush=True)
    return found


def report(mib: int, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print a table of medians."""
    medians = {
        way: [statistics.median(column) for column in zip(*rounds)] for way, rounds in found.items()
    }
    pairs = list(zip(found["verified"], found["read"]))
    both = statistics.median(first[0] + second[0] for first, second in pairs)
    medians["verified and read"] = [both, max(medians["verified"][1], medians["read"][1])]
    print("| way | s | MiB/s | of boto3's time | memory, MiB |\n|---|---|---|---|---|")
    for way, (seconds, memory) in medians.items():
        other = UP if way in ("written", UP) else DOWN
        part = seconds / medians[other][0]
        print(f"| {way} | {seconds:.2f} | {mib / seconds:.0f} | {part:.2f} | {memory:.0f} |")
    print(f"load of the machine {os.getloadavg()[0]:.1f}")


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    with tempfile.TemporaryDirectory() as name:
        # Also for what the server and the writer keep in files.
        os.environ["TMPDIR"] = tempfile.tempdir = name
        with ServerProcess() as server:
            os.environ |= variables(server.address)
            found = measure(mib, Path(name))
    report(mib, found)


if __name__ == "__main__":
    main()
