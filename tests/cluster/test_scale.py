"""What a rank does for all others, counted where there are many of them: docs/scaling.md."""

import pytest
import torch.distributed as dist

from torchmars import storage as storages
from torchmars.checkpoint import manifest as manifests
from torchmars.cluster import startup, watchdog
from torchmars.storage.local import LocalStorage


class CountingStore:
    """A store that counts what is asked of it."""

    def __init__(self):
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("ranks", [8, 4096])
def test_ranks_that_have_come_are_one_question(monkeypatch, ranks):
    store = CountingStore()
    monkeypatch.setattr(startup.process, "rank", iter(range(ranks)).__next__)
    for _ in range(ranks):
        startup.come(store, "here", "n1")
    store.asked = 0
    startup.wait_for_ranks(store, "here", ranks)
    assert store.asked == 1


class World:
    """The part of a layout that a watchdog uses, on a rank of many."""

    device = type("Device", (), {"type": "cpu"})

    def __init__(self, rank, size):
        self.world = type("Group", (), {"rank": rank, "size": size})


@pytest.mark.parametrize("rank,asked", [(0, 511), (7, 511), (8, 0), (511, 0)])
def test_few_ranks_read_what_all_have_written_of_a_hang(monkeypatch, tmp_path, rank, asked):
    read = []
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(
        watchdog, "place_of_rank", lambda folder, rank: read.append(rank) or "there"
    )
    monkeypatch.setattr(watchdog, "hang_report", lambda *unused: "the report")
    hung = watchdog.Watchdog(tmp_path, World(rank, 512), 1.0, "saves")
    hung._open()
    hung._report()
    hung.stream.close()
    assert len(read) == asked


class CountingStorage(LocalStorage):
    """Local files, of which it counts what is listed and opened."""

    def __init__(self):
        self.listed, self.opened = 0, 0

    def list(self, folder):
        self.listed += 1
        return super().list(folder)

    def open(self, file):
        self.opened += 1
        return super().open(file)


def test_ranks_share_the_verification_of_a_checkpoint(tmp_path, monkeypatch):
    names = [f"__{rank}_0.distcp" for rank in range(64)]
    for name in names:
        (tmp_path / name).write_text(name)
    files = {name: manifests.describe_file(tmp_path / name) for name in names}
    manifest = manifests.CheckpointManifest(1, 0, 64, "", 2, {}, {}, files=files)
    counts = []
    for rank in range(32):
        storage = CountingStorage()
        monkeypatch.setattr(storages, "LOCAL", storage)
        manifests.verify(tmp_path, manifest, "size", rank, 32)
        counts.append((storage.listed, storage.opened))
    assert counts == [(1, 2)] + [(0, 2)] * 31  # the first one alone lists the folder
