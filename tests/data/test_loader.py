"""The global order of the data: the same on every layout, and it goes on where it was."""

import os
import pickle
import shutil
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory  # private, torch 2.11 to 2.15

from tests.support.shards import write_shards
from torchmars.config import DataConfig
from torchmars.data import order
from torchmars.data.loader import Loader, Sent, validation_batches
from torchmars.data.mixture import MixedWindows
from torchmars.data.order import window_of_sample
from torchmars.data.shares import Shares
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import ChangedData, Windows

T = 16


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader") / "shards"
    generator = np.random.default_rng(0)
    documents = (
        "".join(map(chr, generator.integers(32, 127, size=generator.integers(10, 200))))
        for _ in range(60)
    )
    manifest = write_shards(DataConfig(), ByteTokenizer(), documents, folder, shard_tokens=500)
    return folder, manifest.splits["train"]


@pytest.fixture(scope="module")
def windows(split):
    return Windows(*split, "uint16", T)


def stream(folder, split):
    return np.concatenate(
        [np.fromfile(folder / shard.file, dtype="<u2") for shard in split.shards]
    ).astype(np.int64)


def test_windows_tile_the_stream_across_shards(split, windows):
    tokens = stream(*split)
    assert len(split[1].shards) > 5 and len(windows) == (len(tokens) - 1) // T
    for number in range(len(windows)):
        assert np.array_equal(windows[number].numpy(), tokens[number * T : (number + 1) * T + 1])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_each_epoch_is_a_permutation(n):
    epochs = [[window_of_sample(epoch * n + i, n, seed=7) for i in range(n)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n >= 16:
        assert epochs[0] != epochs[1] and epochs[0] != [
            window_of_sample(i, n, seed=8) for i in range(n)
        ]


def test_the_permutation_looks_random():
    n = 4096
    order = np.array([window_of_sample(i, n, seed=0) for i in range(n)])
    correlation = np.corrcoef(order, np.arange(n))[0, 1]
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 5 / n**0.5 and abs(neighbours) < 5 / n**0.5


def global_batches(windows, steps, *, ranks=1, microbatch=None, workers=0, position=0, batch=12):
    """Return the windows of each step in global order, put together from all ranks."""
    share = batch // ranks
    result = [[] for _ in range(steps)]
    for rank in range(ranks):
        loader = Loader(
            MixedWindows([windows]),
            seed=3,
            global_batch_size=batch,
            microbatch_size=microbatch or share,
            rank=rank,
            ranks=ranks,
            num_workers=workers,
        )
        loader.seek(position, Shares())
        for step in range(steps):
            ahead = loader.peek()
            microbatches = loader.step()
            assert ahead is microbatches  # looking ahead takes nothing
            assert all(tokens.shape == (microbatch or share, T + 1) for tokens in microbatches)
            result[step] += torch.cat(microbatches).tolist()
        assert loader.position == position + steps * batch
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4},
        {"microbatch": 3},
        {"ranks": 2, "microbatch": 2},
        {"workers": 1},
        {"workers": 2, "microbatch": 4},
    ],
)
def test_order_is_the_same_on_every_layout(windows, options):
    steps = len(windows) // 12 + 3  # into the second epoch
    expected = [
        [windows[window_of_sample(step * 12 + i, len(windows), 3)].tolist() for i in range(12)]
        for step in range(steps)
    ]
    assert global_batches(windows, steps, **options) == expected


def test_resumes_at_any_position_on_another_layout(windows):
    straight = global_batches(windows, 6)
    assert (
        global_batches(windows, 2, ranks=2)
        + global_batches(windows, 4, ranks=4, workers=1, position=24)
        == straight
    )


@pytest.mark.parametrize(
    "count,batch,ranks", [(7, 2, 2), (8, 2, 4), (5, 3, 1), (3, 2, 4), (10_000, 8, 2)]
)
def test_validation_windows_are_each_counted_once(windows, count, batch, ranks):
    counted, batches = [], []
    for rank in range(ranks):
        share = list(validation_batches(MixedWindows([windows]), [1.0], count, batch, rank, ranks))
        batches.append(len(share))
        for tokens, parts in share:
            assert tokens.shape == (batch, T + 1)
            counted += tokens[: len(parts)].tolist()
    assert len(set(batches)) == 1  # a sharded forward needs every rank
    count = min(count, len(windows))
    assert sorted(counted) == sorted(
        windows[i * len(windows) // count].tolist() for i in range(count)
    )


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def zero(file):
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))


def replace(file):
    """By another one of the same size, as a folder that is prepared anew would."""
    other = file.with_name("other")
    other.write_bytes(b"\xff" * file.stat().st_size)
    other.rename(file)


def as_fifo(file):
    """By one, which nobody writes to: whoever opens it waits."""
    file.unlink()
    os.mkfifo(file)


CHANGES = {
    as_fifo: "is missing",
    truncate: "bytes, its manifest says",
    zero: "was altered",
    replace: "was altered",
    os.unlink: "is missing",
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_is_named_and_gives_no_tokens(split, tmp_path, change, workers):
    """A short read and not a bus error; zeros, for a rank must stay in step until all know."""
    folder = shutil.copytree(split[0], tmp_path / "shards")
    windows = Windows(folder, split[1], "uint16", T)
    loader = Loader(
        MixedWindows([windows]),
        seed=3,
        global_batch_size=12,
        microbatch_size=6,
        rank=0,
        ranks=1,
        num_workers=workers,
    )
    before = torch.cat(loader.step())
    assert before.any() and loader.changed is None
    for shard in split[1].shards:
        change(folder / shard.file)
    for _ in range(8):  # a worker has read some steps ahead
        batch = loader.step()
    assert [tokens.shape for tokens in batch] == [(6, T + 1)] * 2 and not torch.cat(batch).any()
    message = rf"^the data changed while the run read them: the shard \S+bin .*{CHANGES[change]}"
    with pytest.raises(ChangedData, match=message):
        loader.check()
    assert "\n" not in str(loader.changed)
    loader.close()


def test_a_shard_that_is_only_touched_or_written_again_is_read_on(split, tmp_path):
    folder = shutil.copytree(split[0], tmp_path / "shards")
    windows = Windows(folder, split[1], "uint16", T)
    expected = [windows[window].tolist() for window in range(len(windows))]
    for number, shard in enumerate(split[1].shards):
        if number % 2:
            os.utime(folder / shard.file, (1, 1))
        else:
            (folder / shard.file).write_bytes((folder / shard.file).read_bytes())
    assert [windows[window].tolist() for window in range(len(windows))] == expected


def test_workers_find_the_windows(windows, monkeypatch):
    here, find = os.getpid(), order.place_of_sample

    def find_elsewhere(*args):
        assert os.getpid() != here
        return find(*args)

    monkeypatch.setattr(order, "place_of_sample", find_elsewhere)
    found = global_batches(windows, 2, workers=1)
    assert found == [
        [windows[window_of_sample(step * 12 + i, len(windows), 3)].tolist() for i in range(12)]
        for step in range(2)
    ]


def test_what_workers_send_is_no_file_and_is_pinned(monkeypatch):
    sent = Sent.together([torch.arange(5), torch.arange(5, 10)])
    assert b"rebuild_storage" in ForkingPickler.dumps(sent.windows).tobytes()
    written = ForkingPickler.dumps(sent).tobytes()
    assert b"rebuild_storage" not in written
    sent = pickle.loads(written)
    assert sent.windows.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert sent.windows.dtype == torch.int64
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: -self
    )  # there is no GPU to pin for
    assert torch.equal(pin_memory(sent).windows, -sent.windows)
