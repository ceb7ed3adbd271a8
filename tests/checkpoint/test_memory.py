"""Copies of a run in memory: the newest whole one is found, whatever ranks and machines died."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.damage import spoil
from tests.support.ranks import run_ranks
from torchmars.checkpoint.manifest import FORMAT, VERSION, CheckpointManifest
from torchmars.checkpoint.memory import shared_memory, slots
from torchmars.checkpoint.memory.copies import MemoryCopies, choose_copy
from torchmars.checkpoint.memory.shared_memory import MEMORY
from torchmars.checkpoint.memory.slots import Key
from torchmars.config import Degrees
from torchmars.core import files
from torchmars.core.errors import UserError
from torchmars.parallel.layout import Layout

NEEDED = {
    "run": {"seed": 0},
    "training": {"dtype": 0, "compile": 0},
    "optimizer": {"matrix_dtype": 0},
}


def test_the_newest_copy_of_which_all_parts_are_there_is_chosen():
    old, new, other = Key(0, 3, "a", 2), Key(0, 4, "a", 2), Key(0, 9, "b", 2)
    here = [(old, 0), (old, 1), (new, 0), (new, 1), (other, 0)]
    assert choose_copy([here, here], least=0) == (new, [0, 1])
    assert choose_copy([here, here], least=5) is None
    assert choose_copy([[(new, 0), (old, 0)], [(old, 1)]], least=0) == (old, [0, 1])
    assert choose_copy([[], []], least=0) is None
    # Two machines of two ranks: the second one is new, the first one has copies of its ranks.
    new = Key(0, 4, "a", 4)
    first = [(new, 0), (new, 1), (new, 2), (new, 3), (old, 0)]
    assert choose_copy([first, first, [], []], least=0) == (new, [0, 1, 0, 1])
    # Another number of ranks. A machine was left behind by the others, which went back.
    more, fewer = (
        [(Key(1, 4, "b", 3), rank) for rank in range(3)],
        [(Key(0, 5, "a", 2), 0), (Key(0, 5, "a", 2), 1)],
    )
    assert choose_copy([[*more, *fewer], []], least=0) == (Key(1, 4, "b", 3), [0, 0, 0])
    assert choose_copy([more[:2], fewer], least=0) == (Key(0, 5, "a", 2), [1, 1])
    assert choose_copy([more[:2], fewer[:1]], least=0) is None


def state(step, rank, layout):
    """Tensors of a step: one that all ranks have a part of, others of other dtypes and sizes."""
    mesh = init_device_mesh("cpu", (layout.world.size,))
    whole = torch.arange(21.0).view(7, 3) + 100 * step
    return {
        "weight": distribute_tensor(whole, mesh, [Shard(0)]),
        "bytes": torch.full((5 + rank,), step, dtype=torch.uint8),
        "half": torch.tensor(step / 2, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
    }


def manifest(step):
    return CheckpointManifest(step, 8 * step, dist.get_world_size(), "tokens", 2, {}, NEEDED)


def opened(folder, here):
    """The copies of this rank, on a machine of `here` ranks that keeps them in `folder`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    machine = Path(folder) / f"machine-{rank // here}"
    machine.mkdir(exist_ok=True)
    os.environ |= {"LOCAL_RANK": f"{rank % here}", MEMORY: f"{machine}"}
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=size))
    return MemoryCopies(layout, state(0, rank, layout)), layout


def kept(folder, here, steps):
    """Keep copies of `steps`."""
    copies, layout = opened(folder, here)
    for step in steps:
        copies.keep(manifest(step), state(step, dist.get_rank(), layout))
    copies.layout.on_all(copies._wait)


def found(folder, here, least=0):
    """The step of the newest copy, and the rank's tensors in it; None without one."""
    copies, layout = opened(folder, here)
    newest = copies.newest(least)
    if newest is None:
        return None
    read, parts = newest
    wanted = state(read.step, dist.get_rank(), layout)
    assert read == manifest(read.step) and parts.keys() == wanted.keys()
    for name, part in parts.items():
        value = wanted[name]
        assert torch.equal(part, value.to_local() if name == "weight" else value)
    return read.step


def test_copies_that_are_damaged_are_found_and_older_ones_taken(tmp_path):
    run_ranks(kept, 2, tmp_path, 2, [1, 2, 3])
    assert run_ranks(found, 2, tmp_path, 2) == [3, 3]
    assert len(list(tmp_path.rglob("*.json"))) == 2  # what is not resumed from is gone
    run_ranks(kept, 2, tmp_path, 2, [4])
    assert run_ranks(found, 2, tmp_path, 2, 5) == [None, None]
    run_ranks(kept, 2, tmp_path, 2, [5, 6])
    headers = {file.name: file for file in tmp_path.rglob("*.json")}
    newest = {name for name, file in headers.items() if '"step": 6' in file.read_text()}
    (name,) = (each for each in newest if "00001" in each)
    spoil(tmp_path, "rank-00001", name[-6])
    assert run_ranks(found, 2, tmp_path, 2) == [5, 5]
    for number in range(2):
        spoil(tmp_path, "rank-00000", number)
    assert run_ranks(found, 2, tmp_path, 2) == [None, None]


def test_an_older_copy_is_taken_where_the_newest_makes_no_sense(tmp_path):
    run_ranks(kept, 2, tmp_path, 2, [1, 2])
    for file in tmp_path.rglob("rank-00001-*.json"):
        header = slots.header_of(file.read_bytes())
        if header.step == 2:  # its manifest lacks what loading needs
            nonsense = replace(header.read_manifest(), config={"run": {"seed": 0}})
            file.write_text(replace(header, manifest=nonsense.text()).text())
    assert run_ranks(found, 2, tmp_path, 2) == [1, 1]


def test_a_machine_that_is_replaced_gets_its_copies_from_the_other_one(tmp_path):
    run_ranks(kept, 4, tmp_path, 2, [1, 2])
    lost = tmp_path / "machine-1"
    assert {file.name[:10] for file in lost.glob("*.json")} == {f"rank-0000{n}" for n in range(4)}
    for file in lost.iterdir():
        file.unlink()
    assert run_ranks(found, 4, tmp_path, 2) == [2] * 4
    assert len(list(lost.glob("*.json"))) == 2  # again its own
    run_ranks(kept, 4, tmp_path, 2, [3])
    for folder in (lost, tmp_path / "machine-0"):
        for file in folder.iterdir():
            file.unlink()
    assert run_ranks(found, 4, tmp_path, 2) == [None] * 4


def test_other_tensors_have_no_use_for_copies(tmp_path):
    """Of another number of ranks, by the parts of one of which each rank has a size of its own."""
    run_ranks(kept, 2, tmp_path, 2, [1])
    assert run_ranks(found, 3, tmp_path, 3) == [None] * 3


def without_room(folder):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == 1:
        os.posix_fallocate = full
    with pytest.raises(UserError) as refused:
        opened(folder, 2)
    return str(refused.value)


def test_too_little_memory_is_told_and_what_there_is_given_back(tmp_path):
    told = run_ranks(without_room, 2, tmp_path)
    assert told[0] == told[1] and "rank 1 needs 0 MiB of /dev/shm on " in told[0]
    assert not list(tmp_path.rglob("rank-00001*"))


HOLDS = """
import sys
from pathlib import Path
from torchmars.checkpoint.memory import shared_memory
shared_memory.PLACE = Path(sys.argv[1])
with shared_memory.shared_memory():
    print(shared_memory.memory_of_launcher(), flush=True)
    sys.stdin.readline()
"""


def test_what_a_launcher_that_crashed_has_left_is_deleted_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path)
    lives, crashes = (
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(tmp_path)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    )
    other, left = (Path(each.stdout.readline().strip()) for each in (lives, crashes))
    begun = tmp_path / f"{shared_memory.PREFIX}begun"
    begun.mkdir()
    crashes.send_signal(signal.SIGKILL)
    crashes.wait()
    assert left.exists()
    with shared_memory.shared_memory():
        own = shared_memory.memory_of_launcher()
        assert {*tmp_path.iterdir()} == {own, other, begun}
    lives.communicate("\n")
    assert {*tmp_path.iterdir()} == {begun}


def test_a_lock_is_held_when_others_see_it(tmp_path, monkeypatch):
    """Two launchers start at once: neither takes the other's folder for one that was left."""
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path)
    take, seen = files._take, []

    def watched(descriptor):
        seen.append(list(tmp_path.glob(f"*/{shared_memory.LOCK}*")))
        return take(descriptor)

    monkeypatch.setattr(files, "_take", watched)
    with shared_memory.shared_memory():
        assert seen == [[]]
        assert (shared_memory.memory_of_launcher() / shared_memory.LOCK).exists()
        subprocess.run([sys.executable, "-c", CLEANS, str(tmp_path)], check=True)
        assert shared_memory.memory_of_launcher().exists()


CLEANS = """
import sys
from pathlib import Path
from torchmars.checkpoint.memory import shared_memory
shared_memory.PLACE = Path(sys.argv[1])
shared_memory.clean()
"""


def test_a_place_without_shared_memory_has_no_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path / "none")
    with shared_memory.shared_memory():
        assert shared_memory.memory_of_launcher() is None


def damages_of(whole):
    """Contents of a damaged header: cut short, bits that fell over, other files in its place."""
    yield from (whole[: len(whole) * part // 20] for part in range(20))
    for place in range(0, len(whole), 37):
        yield whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
    yield from (whole + b"x", b"\0" * len(whole), b"[]", b"null", b"1e999", b"[" * 10**5, b"\xff")
    yield whole.replace(b"copy-%d" % VERSION, b"copy-4")
    yield FORMAT.text({}).encode()  # of a manifest
    yield slots.COPY_FORMAT.text({"step": 1}).encode()
    yield slots.COPY_FORMAT.text({"step": "1", "start": 3}).encode()


def sound_header(**changes):
    """The header of a copy of one tensor that one rank has made."""
    about = CheckpointManifest(1, 8, 1, "tokens", 2, {}, NEEDED)
    tensors = [slots.TensorKind("w", "float32", ((2, 6), (0, 4)))]
    return replace(slots.Header(0, 1, "a", 0, 1, about.text(), tensors, 0), **changes)


NONSENSE: dict[str, dict[str, Any]] = {
    "no dtype": {"tensors": [slots.TensorKind("w", "float31", ((0, 16),))]},
    "a module": {"tensors": [slots.TensorKind("w", "nn", ((0, 16),))]},
    "turned round": {"tensors": [slots.TensorKind("w", "float32", ((6, 2), (4, 0)))]},
    "below zero": {"tensors": [slots.TensorKind("w", "float32", ((-4, 0), (0, 4)))]},
    "no manifest": {"manifest": "{}"},
    "half a manifest": {"manifest": FORMAT.text({"step": 1})},
    "another step": {"step": 2},
    "another number of ranks": {"ranks": 2},
    "one rank too many": {"rank": 1},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=NONSENSE)
def test_a_header_that_makes_no_sense_is_no_copy_though_its_checksum_is_right(tmp_path, changes):
    header = sound_header(**changes)
    slot = slots.Slot(tmp_path, header.rank, header.ranks, 0, 64)
    slot.complete(header)
    assert slot.header() == header and not list(slots.headers_in(tmp_path))


def test_a_damaged_header_is_no_copy(tmp_path):
    slot = slots.Slot(tmp_path, 0, 1, 0, 64)
    header = sound_header()
    slot.complete(header)
    assert slot.header() == header and slots.slots_of(tmp_path, header.key)
    whole = slot.file.read_bytes()
    for damaged in damages_of(whole):
        slot.file.write_bytes(damaged)
        assert slot.header() is None and not list(slots.headers_in(tmp_path)), damaged[:100]
    slot.file.write_bytes(whole)
    slot.file.rename(tmp_path / "rank-00001-of-00001-0.json")  # of another rank, by its name
    assert not list(slots.headers_in(tmp_path))
    slot.file.write_bytes(whole)
    slot.data.write_bytes(b"x" * 63)
    assert not list(slots.headers_in(tmp_path))
    slot.data.unlink()
    assert not list(slots.headers_in(tmp_path))


def without_a_folder(folder, here):
    """Rank 1 loses its folder, or cannot write to it, after the first copy."""
    copies, layout = opened(folder, here)
    rank = dist.get_rank()
    copies.keep(manifest(1), state(1, rank, layout))
    layout.on_all(copies._wait)
    if rank == 1 and here == 1:
        shutil.rmtree(copies.folder)
    elif rank == 1:
        slots.Path.write_text = full
    copies.keep(manifest(2), state(2, rank, layout))
    with pytest.raises(UserError) as told:
        copies.keep(manifest(3), state(3, rank, layout))
    return str(told.value)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("here, reason", [(2, "No space left on device"), (1, "No such file")])
def test_a_copy_that_cannot_be_written_is_told_on_all_ranks_at_the_next_one(tmp_path, here, reason):
    """On one machine of two ranks, and on two that keep each other's copies."""
    first, second = run_ranks(without_a_folder, 2, tmp_path, here)
    assert first == second and first.startswith("rank 1 on ") and reason in first


def test_a_damaged_copy_at_the_partner_is_not_asked_for_again(tmp_path):
    run_ranks(kept, 2, tmp_path, 1, [1, 2])
    for file in (tmp_path / "machine-1").iterdir():
        file.unlink()
    for number in range(2):
        spoil(tmp_path / "machine-0", "rank-00001", number)
    assert run_ranks(found, 2, tmp_path, 1) == [None, None]


RANK = """
import sys
from torchmars.core.files import lock
lock(__import__("pathlib").Path(sys.argv[1]) / "lock-00000", "using it")
print(flush=True)
sys.stdin.readline()
"""


def test_ranks_that_outlive_their_launcher_keep_its_folder_until_they_end(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path)
    folder = tmp_path / f"{shared_memory.PREFIX}killed"
    folder.mkdir()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    rank.stdout.readline()
    # No process has that of the launcher.
    (folder / "lock").write_text(f"process 1 on {socket.gethostname()}, since yesterday")
    shared_memory.clean()
    assert folder.exists()
    rank.communicate(b"\n")
    shared_memory.clean()
    assert not folder.exists()


def test_what_others_have_made_under_such_a_name_stays_and_hinders_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "PLACE", tmp_path)
    (tmp_path / f"{shared_memory.PREFIX}file").touch()
    (tmp_path / f"{shared_memory.PREFIX}link").symlink_to(tmp_path)
    with monkeypatch.context() as as_another_user:
        as_another_user.setattr(os, "getuid", lambda: 12345)
        folder = tmp_path / f"{shared_memory.PREFIX}folder"
        folder.mkdir()
        (folder / "lock").touch()
        shared_memory.clean()
    before = {*tmp_path.iterdir()}
    assert folder in before
    monkeypatch.setattr(Path, "glob", refused_in(folder))
    with shared_memory.shared_memory():
        own = shared_memory.memory_of_launcher()
        assert {*tmp_path.iterdir()} == {*before, own}


def refused_in(folder, glob=Path.glob):
    def of_others(path, pattern):
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return glob(path, pattern)

    return of_others
