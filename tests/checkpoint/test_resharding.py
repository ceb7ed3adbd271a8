"""Copies of a run in memory, read by another number of ranks than made them."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.test_memory import manifest
from tests.support.damage import flip
from tests.support.ranks import run_ranks
from torchmars.checkpoint.memory import exchange
from torchmars.checkpoint.memory.copies import MemoryCopies
from torchmars.checkpoint.memory.exchange import Resharding
from torchmars.checkpoint.memory.shared_memory import MEMORY
from torchmars.checkpoint.memory.slots import HEADERS, header_of
from torchmars.config import Degrees
from torchmars.core.errors import UserError
from torchmars.optim.tensors import local_part
from torchmars.parallel.layout import Layout

# Of 4 ranks, on a mesh of 2 x 2, and of other numbers of ranks.
PLACEMENTS = {
    "rows": ([Replicate(), Shard(0)], [Shard(0)]),
    "columns": ([Shard(1), Replicate()], [Shard(1)]),
    "tiles": ([Shard(0), Shard(1)], [Shard(1)]),
    "few": ([Shard(0), Replicate()], [Shard(0)]),
    "all": ([Replicate(), Replicate()], [Replicate()]),
}
SHAPES = {"rows": (7, 3), "columns": (4, 5, 2), "tiles": (6, 7), "few": (2, 3), "all": (3,)}


def state(step):
    """Tensors of a step in all ways to lie on ranks: some of these have no part of some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if size == 4 else (size,))
    generator = torch.Generator().manual_seed(step)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    whole["tiles"] = whole["tiles"].bfloat16()
    return {
        **{
            name: distribute_tensor(tensor, mesh, PLACEMENTS[name][size != 4])
            for name, tensor in whole.items()
        },
        "plain": torch.full((5,), step, dtype=torch.uint8),
        "scalar": torch.tensor(step / 2, dtype=torch.bfloat16),
        "flag": torch.tensor(step % 2 == 0),
        "nothing": torch.empty(0, 3),
        f"rng.cpu.{rank}": torch.full((4 + rank,), rank, dtype=torch.uint8),
    }


def opened(folder, machines):
    """The copies of this rank. `machines` has the letter of each rank's machine."""
    exchange.PIECE = 20  # bytes: most tensors are sent in several pieces
    rank = dist.get_rank()
    machine = Path(folder) / machines[rank]
    machine.mkdir(exist_ok=True)
    os.environ |= {"LOCAL_RANK": f"{rank - machines.index(machines[rank])}", MEMORY: f"{machine}"}
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=dist.get_world_size()))
    return MemoryCopies(layout, state(0))


def check(copies, least=0):
    """The step of the newest copy, of which this rank's parts are right; None without one."""
    newest = copies.newest(least)
    if newest is None:
        return None
    read, parts = newest
    step, same = read.step, read.world_size == dist.get_world_size()
    wanted = {
        name: local_part(tensor)
        for name, tensor in state(step).items()
        if same or not name.startswith("rng.")
    }
    assert parts.keys() == wanted.keys() and read.position == 8 * step
    for name, part in parts.items():
        assert part.dtype == wanted[name].dtype and torch.equal(part, wanted[name]), name
    return step


def went_on(folder, machines, steps=()):
    """Go on from the newest copy, and keep copies of `steps`; return the step of the first one."""
    copies = opened(folder, machines)
    found = check(copies)
    for step in steps:
        copies.keep(manifest(step), state(step))
    copies.layout.on_all(copies._wait)
    return found


def run(folder, machines, steps=()):
    """The step that all ranks, one for each letter of `machines`, go on from."""
    (found,) = {*run_ranks(went_on, len(machines), folder, machines, steps)}
    return found


def files_of(folder, ranks):
    return [*folder.rglob(f"rank-*-of-{ranks:05d}-*")]


def spoil(folder, rank, step):
    """Change a bit of each copy of a rank's part of a step in a folder."""
    for file in folder.rglob(HEADERS):
        header = header_of(file.read_bytes())
        if (header.rank, header.step) == (rank, step):
            data = file.with_suffix("")
            flip(data, 4 * data.stat().st_size)


def lose(folder, machines):
    for machine in machines:
        shutil.rmtree(folder / machine)


def test_any_number_of_ranks_goes_on_from_copies_of_any_other(tmp_path):
    """Those of the old number stay until the first of the new one are complete."""
    assert run(tmp_path, "abc", [1, 2]) is None
    assert run(tmp_path, "ab", [3]) == 2
    assert len([*tmp_path.glob("[ab]/rank-*-of-00003-*.json")]) == 2 * 2
    assert run(tmp_path, "ab", [4, 5]) == 3
    assert {file.parent.name for file in files_of(tmp_path, 3)} == {"c"}  # which is no more
    assert run(tmp_path, "aabb", [6]) == 5
    assert run(tmp_path, "aabb", [7, 8]) == 6 and not files_of(tmp_path, 2)
    assert run(tmp_path, "aab") == 8  # of machines with different numbers of ranks
    assert run(tmp_path, "a") == 8
    assert run(tmp_path, "bbbb") == 8  # ranks of the same number on one machine


def test_damaged_parts_and_lost_machines_cost_no_more_than_they_must(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    assert run(kept, "abc", [1, 2]) is None

    def after(harm, machines):
        folder = shutil.copytree(kept, tmp_path / "now")
        harm(folder)
        found = run(folder, machines)
        shutil.rmtree(folder)
        return found

    assert after(lambda folder: lose(folder, "c"), "ab") == 2
    assert after(lambda folder: lose(folder, "a"), "bbccc") == 2
    assert after(lambda folder: lose(folder, "ab"), "cd") is None
    assert after(lambda folder: spoil(folder / "b", 1, 2), "cb") == 2  # c has it too
    assert after(lambda folder: spoil(folder, 1, 2), "ab") == 1
    assert after(lambda folder: [spoil(folder, 1, 2), spoil(folder, 2, 1)], "ab") is None


def without_room(folder, machines):
    """Go on where files of copies of two numbers of ranks have no room at once."""
    allocate = os.posix_fallocate

    def allocate_if_alone(descriptor, offset, size):
        if any(files_of(Path(folder), 3)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    os.posix_fallocate = allocate_if_alone
    copies = opened(folder, machines)
    assert check(copies) == 2 and not files_of(Path(folder), 2)
    for step in (3, 4):
        copies.keep(manifest(step), state(step))
    return check(copies)


def test_copies_of_before_make_room_once_they_are_read(tmp_path):
    run(tmp_path, "abc", [1, 2])
    lose(tmp_path, "c")
    assert run_ranks(without_room, 2, tmp_path, "ab") == [4, 4]
    assert not files_of(tmp_path, 3)


def without_memory(folder, machines):
    """Rank 1 has no memory for its tensors."""

    def refuse(_):
        raise RuntimeError("you tried to allocate 12 bytes")

    if dist.get_rank() == 1:
        Resharding.reserve = refuse
    with pytest.raises(UserError) as told:
        opened(folder, machines).newest(0)
    return str(told.value)


def test_a_rank_without_memory_is_told_on_all_ranks(tmp_path):
    run(tmp_path, "abc", [1])
    first, second = run_ranks(without_memory, 2, tmp_path, "ab")
    assert first == second and first.startswith("rank 1 on ") and "allocate" in first
