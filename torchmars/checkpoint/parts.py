"""The parts of a checkpoint's index that ranks need, read once on each machine.

The index names every chunk of every rank. In Python it takes 16 times its file, a gigabyte for
Llama 8B on 512 ranks, and a rank needs little of it. So the first rank of each machine lets a
process of its own read and check it, and gives every rank of the machine its part.
"""

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchmars.checkpoint.index import read_index, tensors_in
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.cluster import process
from torchmars.cluster.signals import be_helper
from torchmars.optim.matrices.shapes import Interval
from torchmars.optim.tensors import local_intervals
from torchmars.parallel.layout import Layout

Boxes = Mapping[str, tuple[Interval, ...]]
"""The part that a rank has of each tensor, by name: an interval of each dim."""


def read_index_part(
    folder: PurePath, manifest: CheckpointManifest, layout: Layout, state: Mapping[str, Tensor]
) -> dcp.Metadata:
    """Return the index of the checkpoint `folder`, of chunks that this rank's `state` needs alone.

    It has all tensors, some without chunks. Called by every rank. Raises `DamagedCheckpoint` on
    every rank.
    """
    rank = layout.world.rank
    wanted = {rank: {name: local_intervals(value) for name, value in state.items()}}
    reader, *others = next(
        ranks for ranks in layout.machines(process.local_rank()) if rank in ranks
    )
    if rank == reader:
        wanted |= {other: layout.receive(other) for other in others}
    else:
        layout.send(wanted[rank], reader)
    parts: dict[int, bytes] = {}

    def read() -> None:
        if rank == reader:
            parts.update(in_child(lambda: parts_of(read_index(folder, manifest), wanted)))

    layout.on_all(read)
    if rank == reader:
        for other in others:
            layout.send(parts[other], other)
    part: dcp.Metadata = pickle.loads(parts[rank] if parts else layout.receive(reader))
    return part


def parts_of(index: dcp.Metadata, wanted: Mapping[int, Boxes]) -> dict[int, bytes]:
    """Return for each rank the part of `index` with the chunks that it wants, pickled."""
    parts = {rank: dcp.Metadata({}, storage_data={}) for rank in wanted}
    for name, tensor in tensors_in(index).items():
        shape = (len(tensor.chunks), len(tensor.size))
        begins = np.array([chunk.offsets for chunk in tensor.chunks], np.int64).reshape(shape)
        sizes = np.array([chunk.sizes for chunk in tensor.chunks], np.int64).reshape(shape)
        for rank, boxes in wanted.items():
            near: list[int] = []
            if name in boxes and len(boxes[name]) == len(tensor.size):
                begin, end = np.array(boxes[name], np.int64).reshape(-1, 2).T
                near = np.flatnonzero(((begins < end) & (begins + sizes > begin)).all(1)).tolist()
            chunks = [tensor.chunks[number] for number in near]
            parts[rank].state_dict_metadata[name] = TensorStorageMetadata(
                tensor.properties, tensor.size, chunks
            )
            for number, chunk in enumerate(chunks):
                key = MetadataIndex(name, chunk.offsets, number)
                if key in index.storage_data:  # a chunk without elements may lie nowhere
                    parts[rank].storage_data[key] = index.storage_data[key]
    return {rank: pickle.dumps(part) for rank, part in parts.items()}


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, run in a fork of this process, whose memory ends with it.

    Raises the errors of `work`.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        be_helper()  # the rank ends it
        try:
            send.send((work(), None))
        except Exception as error:
            send.send((None, error))

    child = context.Process(target=run, daemon=True)
    child.start()
    send.close()
    try:
        result, error = receive.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"a process ended with {child.exitcode}: is memory short?") from None
    child.join()
    if error is not None:
        raise error
    return result
