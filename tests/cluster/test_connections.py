"""How many connections a rank has, where gloo makes them as they are used."""

import os
import resource
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import context
from torchmars.cluster import process
from torchmars.parallel.groups import make_control_group

RANKS = 8


def open_files():
    """How many files this rank has open, once all have taken the connections that they asked for.

    A connection is there for the one that asks before the other has taken it.
    """
    dist.barrier()
    counts: list[int] = []
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        counts.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.03)
    return counts[-1]


def count(rank, store, results):
    """Count this rank's files: without a control group, with one, and once all is told by it."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as `connection.start` does on a GPU
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    files = [open_files()]
    group = make_control_group()
    files.append(open_files())
    first = rank == 0
    dist.all_reduce(torch.ones(1), group=group)
    dist.broadcast_object_list([rank], group=group, group_src=0)
    dist.gather_object(rank, [rank] * RANKS if first else None, group=group, group_dst=0)
    dist.scatter_object_list([None], [rank] * RANKS if first else None, group=group, group_src=0)
    files.append(open_files())
    results.put((rank, files))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to count open files")
def test_a_control_group_connects_at_once_whom_it_will_and_nobody_else(tmp_path):
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=count, args=(rank, tmp_path / "store", results))
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(600)
    assert [each.exitcode for each in ranks] == [0] * RANKS
    found = dict(results.get() for _ in ranks)
    for before, made, used in found.values():
        assert made == used > before
    made = [found[rank][1] - found[rank][0] for rank in range(RANKS)]
    # The first rank has all others. Another has its neighbours, the first, and a branch of a tree.
    assert max(made[1:]) < made[0]


class CountingStore(dist.Store):
    """A store in this process, that counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.values, self.asked, self.changed = {}, 0, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.asked += 1
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.changed.notify_all()

    def get(self, key):
        self.wait([key])
        return self.values[key]

    def wait(self, keys, timeout=None):
        with self.changed:
            self.asked += 1
            self.changed.wait_for(lambda: self.values.keys() >= set(keys))

    def check(self, keys):
        self.asked += 1
        return self.values.keys() >= set(keys)


def ask(sizes, results):
    """Connect groups of these sizes as a control group is; what each asked of its store."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    for size in sizes:
        store, everyone = CountingStore(), threading.Barrier(size)

        def be(rank, size=size, store=store, everyone=everyone):
            group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=600))
            one, each = [torch.ones(1)], [[torch.ones(1) for _ in range(size)]]
            gather = dist.GatherOptions()
            gather.rootRank = 0
            group.allreduce(one).wait()
            group.broadcast(one, dist.BroadcastOptions()).wait()
            group.gather([] if rank else each, one, gather).wait()
            everyone.wait()  # else the others lose their connections

        ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        results.put((size, store.asked))
    os._exit(0)


def test_what_ranks_ask_of_the_store_grows_as_they_do():
    """A mesh of all would ask two questions for each pair: 8,192 of 64 ranks."""
    results = context.SimpleQueue()
    process = context.Process(target=ask, args=([8, 64], results))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    for size, asked in (results.get(), results.get()):
        assert 5 * size <= asked <= 15 * size


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        process.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
