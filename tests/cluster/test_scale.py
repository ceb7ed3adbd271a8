"""What a rank does for all others, counted where there are many of them: docs/benchmarks.md."""

from torchmars import storage as storages
from torchmars.checkpoint import manifest as manifests
from torchmars.storage.local import LocalStorage


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
