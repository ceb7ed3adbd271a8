"""The tensors of checkpoints are planned once, and again only where they are others."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import run_ranks
from tests.support.storages import Creating, keep_on
from torchmars.checkpoint.reader import INDEX, IndexUnpickler, read_tensors
from torchmars.checkpoint.writer import TensorWriter
from torchmars.config import Degrees
from torchmars.core.errors import UserError
from torchmars.optim.tensors import local_part
from torchmars.parallel.layout import Layout
from torchmars.storage.local import LOCAL

ROWS, COLUMNS = 7, 3


def refuse(staged, name):
    raise OSError(28, "No space left on device")


def count_calls():
    """Count the chunks that are planned, and the objects that one rank gathers from all."""
    counts = Counter()
    plan, gather = default_planner.create_default_global_save_plan, dist.gather_object

    def counted_plan(plans, *args):
        counts["planned"] += sum(len(each.items) for each in plans)
        return plan(plans, *args)

    def counted_gather(*args, **kwargs):
        counts["gathered"] += 1
        return gather(*args, **kwargs)

    default_planner.create_default_global_save_plan = counted_plan
    dist.gather_object = counted_gather
    return counts


def state_of(layout, value, dtype=torch.float32):
    return {
        "sharded": distribute_tensor(
            value + torch.rand(ROWS, COLUMNS), layout.shard_mesh, [Shard(0)]
        ),
        "the same": torch.full((5,), float(value)),
        f"of rank {layout.world.rank}": torch.full((4,), value, dtype=dtype),
    }


def write_and_read(folder):
    """Write checkpoints one after another, and read each. Return what was counted, and indexes."""
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=2))
    writer, counts, found = TensorWriter(layout), count_calls(), []

    def write(name, state, storage=LOCAL):
        counts.clear()
        keep_on(storage)
        staged = layout.on_first(lambda: storage.stage(Path(folder) / name))
        try:
            writer.write(state, staged)
        except UserError as error:
            found.append((dict(counts), str(error)))
            return
        found.append((dict(counts), index := (staged / INDEX).read_bytes()))
        read = {name: torch.zeros_like(value) for name, value in state.items()}
        with open(staged / INDEX, "rb") as stream:
            read_tensors(staged, read, IndexUnpickler(stream).load())
        assert all(torch.equal(local_part(read[name]), local_part(state[name])) for name in state)
        assert index == (staged / INDEX).read_bytes()

    second = layout.world.rank == 1
    broken = Creating(refuse) if second else LOCAL
    write("failed at first", state_of(layout, 1), broken)
    write("first", state_of(layout, 2))
    write("second", state_of(layout, 3))
    write("failed", state_of(layout, 4), broken)
    write("after it", state_of(layout, 5))
    write("another dtype on one rank", state_of(layout, 6, [torch.float32, torch.int64][second]))
    if second:  # as if its chunks took other bytes than in the file before
        writer.plan = replace(writer.plan, places=[])
    write("elsewhere on one rank", state_of(layout, 7, [torch.float32, torch.int64][second]))
    return found


def test_a_checkpoint_is_planned_once_while_its_tensors_are_the_same(tmp_path):
    first, second = run_ranks(write_and_read, 2, str(tmp_path))
    # Two shards, what both have once, and what each has alone.
    # Sizes and checksums of the files are gathered too, of a checkpoint that is whole.
    failed, made = ({"planned": 5, "gathered": number} for number in (2, 3))
    kept, full = {"gathered": 1}, "No space left on device"
    assert [each for each, _ in first] == [failed, made, kept, {}, kept, made, made]
    indexes = [index for _, index in first]
    assert indexes == [index for _, index in second]
    assert indexes[0] == indexes[3] == full
    assert indexes[1] == indexes[2] == indexes[4] != indexes[5] == indexes[6]
