"""The parts of an index that ranks get: what they need of it, without the memory of the whole."""

import gc
import os
import pickle
import resource
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import run_ranks
from torchmars.checkpoint import parts
from torchmars.checkpoint.index import INDEX, read_index
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint, File, describe_file
from torchmars.config import Degrees
from torchmars.parallel.layout import Layout

SIZE, GAP = 64, 1000  # bytes of a chunk, and of its place in a file


def write_index(folder, ranks, tensors):
    """Write the index of `tensors` tensors that `ranks` ranks had a row of each; its size."""
    entries, places = {}, {}
    for number in range(tensors):
        name, chunks = f"optimizer.blocks.{number % 32}.mlp.gate.weight.exp_avg_{number}", []
        for rank in range(ranks):
            begin = torch.Size([rank, 0])
            chunks.append(ChunkStorageMetadata(begin, torch.Size([1, SIZE // 4])))
            place = _StorageInfo(f"__{rank}_0.distcp", number * GAP, GAP)
            places[MetadataIndex(name, begin, rank)] = place
        size = torch.Size([ranks, SIZE // 4])
        properties = TensorProperties(dtype=torch.float32)
        entries[name] = TensorStorageMetadata(properties, size, chunks)
    (folder / INDEX).write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    return (folder / INDEX).stat().st_size


def manifest_of(folder, ranks, tensors):
    files = {f"__{rank}_0.distcp": File(tensors * GAP, "") for rank in range(ranks)}
    files[INDEX] = describe_file(folder / INDEX)
    return CheckpointManifest(1, 0, ranks, "", 2, {}, {}, files=files)


def state_of(layout, ranks, name="optimizer.blocks.0.mlp.gate.weight.exp_avg_0"):
    mesh = init_device_mesh("cpu", (layout.world.size,))
    return {name: distribute_tensor(torch.zeros(ranks, SIZE // 4), mesh, [Shard(0)])}


def read_part(folder, ranks, tensors):
    """Read this rank's part of an index; which process read it, what is in it, the seconds and MiB.

    On two machines, of two ranks each.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=4))

    def told(*args):
        (folder / f"read-{dist.get_rank()}-{os.getpid()}").touch()
        return read_index(*args)

    parts.read_index = told
    state = state_of(layout, ranks)
    gc.collect()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    part = parts.read_index_part(folder, manifest_of(folder, ranks, tensors), layout, state)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    [chunks] = [each.chunks for name, each in part.state_dict_metadata.items() if name in state]
    places = [(key.fqn, key.index, place.relative_path) for key, place in part.storage_data.items()]
    read = [chunk.offsets[0] for chunk in chunks]
    return (
        os.getpid(),
        read,
        places,
        len(part.state_dict_metadata),
        grown,
        time.perf_counter() - began,
    )


def test_one_rank_of_each_machine_reads_the_index_in_another_process(tmp_path):
    write_index(tmp_path, ranks=8, tensors=3)
    ranks = run_ranks(read_part, 4, tmp_path, 8, 3)
    reads = sorted(file.name for file in tmp_path.glob("read-*"))
    assert [name.split("-")[1] for name in reads] == ["0", "2"]
    assert not {int(name.split("-")[2]) for name in reads} & {each[0] for each in ranks}
    for rank, (_, chunks, places, names, _, _) in enumerate(ranks):
        assert chunks == [2 * rank, 2 * rank + 1] and names == 3
        name = "optimizer.blocks.0.mlp.gate.weight.exp_avg_0"
        assert places == [(name, n, f"__{2 * rank + n}_0.distcp") for n in (0, 1)]


def refuse(folder):
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=2))
    try:
        parts.read_index_part(folder, manifest_of(folder, 8, 3), layout, state_of(layout, 8))
    except DamagedCheckpoint as error:
        return str(error)


def test_every_rank_hears_of_a_damaged_index(tmp_path):
    (tmp_path / INDEX).write_bytes(b"damaged")
    first, second = run_ranks(refuse, 2, tmp_path)
    assert first == second and f"{tmp_path / INDEX} is damaged" in first


def end():
    os._exit(9)


class Farewell:
    """Garbage, in a circle, that leaves the number of the process that collects it."""

    def __init__(self, folder):
        self.folder, self.circle = folder, self

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


def test_a_fork_collects_no_garbage_of_the_rank(tmp_path):
    """Objects of torch would wait there for threads that the fork does not have, or crash."""
    gc.disable()
    try:
        Farewell(tmp_path)
        parts.in_child(gc.collect)
        assert not [*tmp_path.iterdir()]
        gc.collect()
    finally:
        gc.enable()
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="a process ended with 9: is memory short?"):
        parts.in_child(end)


@pytest.mark.slow
def test_an_index_of_100_mib_takes_little_memory_of_a_rank(tmp_path):
    size = write_index(tmp_path, ranks=512, tensors=1500)
    assert size > 100 * 2**20
    for _, _, _, _, grown, seconds in run_ranks(read_part, 4, tmp_path, 512, 1500):
        print(f"{grown:.0f} MiB more at the peak, {seconds:.1f} s")
        assert grown < 250
