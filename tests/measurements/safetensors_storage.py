"""Compare the two storages of torch.distributed.checkpoint: its own format, and safetensors.

    python -m tests.measurements.safetensors_storage [FOLDER]

Two ranks of FSDP save the state of GPT-2 small under MARS-AdamW, weights and three buffers in
float32, and load it again, in turn with each storage. Memory is the most that a
rank had resident (VmHWM) beyond what it had before the save. Then come kinds of tensors that the
checkpoints of runs have: is each the same after a save and a load? The last part reads the index of
a checkpoint of eight ranks, as every rank does before a load.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from torchmars.config.load import config_from_tables
from torchmars.models import build_meta_model

ROUNDS, RANKS_OF_INDEX = 3, 8
BUFFERS = "model", "exp_avg", "exp_avg_sq", "last_grad"
STORAGES = "torch", "safetensors"


def writer(storage: str, folder: Path) -> dcp.FileSystemWriter:
    """Return what writes a checkpoint to `folder`, each file flushed to the disk."""
    if storage == "torch":
        return dcp.FileSystemWriter(folder)
    return dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)


def reader(storage: str, folder: Path) -> dcp.FileSystemReader:
    """Return what reads the checkpoint in `folder`."""
    if storage == "torch":
        return dcp.FileSystemReader(folder)
    return dcp.HuggingFaceStorageReader(str(folder))


def small_state(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the state of a run of GPT-2 small, its shards on the ranks of `mesh`."""
    config = config_from_tables({"model": {"name": "gpt2", "size": "small"}}, "in the benchmark")
    model = build_meta_model(config.model, 50257, 1024)
    return {
        f"{buffer}.{name}": sharded(mesh, weight.shape, Shard(0))
        for buffer in BUFFERS
        for name, weight in model.named_parameters()
    }


def sharded(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Placement) -> DTensor:
    """Return a random tensor of `shape`, the same on every layout, in shards on `mesh`."""
    value = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))
    return distribute_tensor(value, mesh, placements)


def memory(key: str) -> float:
    """Return a line of this process's status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def timed(call: Callable[..., Any], *args: Any, **options: Any) -> float:
    """Return the seconds that a call takes on all ranks."""
    dist.barrier()
    began = time.perf_counter()
    call(*args, **options)
    dist.barrier()
    return time.perf_counter() - began


def measure(folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return for each storage seconds of a save, of a load, and the save's memory, each round."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = small_state(mesh)
    found: dict[str, list[tuple[float, float, float]]] = {storage: [] for storage in STORAGES}
    for _ in range(ROUNDS):
        for storage in STORAGES:
            place = folder / storage
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
            before = memory("VmRSS")
            saved = timed(dcp.save, state, storage_writer=writer(storage, place))
            peak = memory("VmHWM") - before
            loaded = timed(dcp.load, state, storage_reader=reader(storage, place))
            found[storage].append((saved, loaded, peak))
    return found


def kinds_of_tensors(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """Return small states by what is special about them."""
    rank = dist.get_rank()
    return {
        "0-d, a step's count": {"step": torch.tensor(3.0)},
        "bytes, of each rank": {f"rng.{rank}": torch.arange(9, dtype=torch.uint8) + rank},
        "int64": {"skipped": torch.arange(3)},
        "bfloat16 shards": {"x": sharded(mesh, (6, 4), Shard(0)).bfloat16()},
        "float64 shards": {"x": sharded(mesh, (6, 4), Shard(0)).double()},
        "fewer rows than ranks": {"x": sharded(mesh, (1, 4), Shard(0))},
        "no rows": {"x": sharded(mesh, (0, 4), Shard(0))},
        "cut over columns": {"x": sharded(mesh, (4, 6), Shard(1))},
        "copies": {"x": sharded(mesh, (4, 6), Replicate())},
        "shards, one of which is lost": {"x": sharded(mesh, (6, 4), Shard(0))},
    }


def probe(folder: Path, storage: str) -> dict[str, str]:
    """Return by kind whether tensors are the same after a save and a load, or what was raised."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for kind, state in kinds_of_tensors(mesh).items():
        place = folder / storage / kind.replace(" ", "-")
        before = {name: _local(value).clone() for name, value in state.items()}
        try:
            dcp.save(state, storage_writer=writer(storage, place))
            if "lost" in kind and dist.get_rank() == 0:
                sorted(path for path in place.iterdir() if path.name != ".metadata")[-1].unlink()
            dist.barrier()
            for value in state.values():
                _local(value).zero_()
            dcp.load(state, storage_reader=reader(storage, place))
        except (Exception, dcp.api.CheckpointException) as error:
            failures = getattr(error, "failures", {0: (error,)})
            first = next(iter(failures.values()))[0]
            found[kind] = f"{type(first).__name__}: {' '.join(str(first).split())[:60]}"
            dist.barrier()
            continue
        same = all(torch.equal(before[name], _local(value)) for name, value in state.items())
        found[kind] = "same" if same else "other values, no error"
    return found


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def index_seconds(folder: Path, storage: str) -> float:
    """Return the seconds in which a rank reads the index of a checkpoint of many ranks."""
    began = time.perf_counter()
    reader(storage, folder / storage).read_metadata()
    return time.perf_counter() - began


def save_many(folder: Path) -> None:
    """Save a Llama of 80 blocks in as many shards as there are ranks, with each storage."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Tensor] = {
        f"{buffer}.blocks.{block}.{name}": sharded(mesh, (8, 2), Shard(0))
        for buffer in BUFFERS
        for block in range(80)
        for name in "q k v o up gate down norm1 norm2".split()
    }
    for storage in STORAGES:
        dcp.save(state, storage_writer=writer(storage, folder / storage))


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        found = run_ranks(measure, 2, folder)[0]
        print("| storage | save, s | load, s | memory of a save, MiB a rank |\n|---|---|---|---|")
        for storage, rounds in found.items():
            median = [statistics.median(each) for each in zip(*rounds)]
            print(f"| {storage} | {median[0]:.2f} | {median[1]:.2f} | {median[2]:,.0f} |")
        kinds = {storage: run_ranks(probe, 2, folder / "kinds", storage)[0] for storage in STORAGES}
        print("\n| kind of tensor | torch | safetensors |\n|---|---|---|")
        for kind, outcome in kinds["torch"].items():
            print(f"| {kind} | {outcome} | {kinds['safetensors'][kind]} |")
        run_ranks(save_many, RANKS_OF_INDEX, folder / "many")
        for storage in STORAGES:
            seconds = index_seconds(folder / "many", storage)
            print(f"{storage}: the index of {RANKS_OF_INDEX} ranks is read in {seconds:.3f} s")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    main()
