"""The global order of the data: the same on every layout, and it goes on where it was."""

import os
import shutil
import sys
import threading
import time
from functools import partial
from threading import current_thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.order import place_of_sample, window_of_sample
from tests.support.shards import write_shards
from torchmars.config import DataConfig
from torchmars.core.errors import LoneMistake, UserError
from torchmars.data.loader import Loader, close_all, validation_batches
from torchmars.data.order import Shares, places_of, shares_from_start, windows_of
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import MixedWindows, Windows

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
        assert np.array_equal(windows[number], tokens[number * T : (number + 1) * T + 1])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_each_epoch_is_a_permutation(n):
    def order(seed, epochs):
        return windows_of(np.arange(epochs * n, dtype=np.uint64), n, seed).reshape(-1, n).tolist()

    epochs = order(7, 3)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n >= 16:
        assert epochs[0] != epochs[1] and epochs[:1] != order(8, 1)


def test_the_permutation_looks_random():
    n = 4096
    order = windows_of(np.arange(n, dtype=np.uint64), n, 0).astype(int)
    correlation = np.corrcoef(order, np.arange(n))[0, 1]
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 5 / n**0.5 and abs(neighbours) < 5 / n**0.5


WEIGHT = st.one_of(st.integers(0, 999_999_999), st.integers(1, 10**18).map(lambda n: n / 10**9))
LENGTH = st.sampled_from([1, 2, 3, 17, 1000, 2**31 - 1, 2**40 + 7, 2**62])


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(WEIGHT, LENGTH), min_size=1, max_size=4),
    st.one_of(st.integers(0, 2**62), st.integers(2**62 - 40, 2**62)),
    st.integers(0, 2**32),
)
def test_many_places_at_once_are_those_of_one_at_a_time(parts, first, seed):
    weights, lengths = zip(*parts)
    shares = shares_from_start(weights if any(weights) else [1] * len(weights))
    samples = range(first, first + 40, 3)
    assert places_of(shares, lengths, seed, np.array(samples)) == [
        place_of_sample(sample, shares, lengths, seed) for sample in samples
    ]


def global_batches(windows, steps, *, ranks=1, microbatch=None, position=0, batch=12):
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
        )
        loader.load_state_dict({"position": position, "shares": Shares()})
        for step in range(steps):
            ahead = loader.peek()
            microbatches = loader.step()
            assert ahead is microbatches  # looking ahead takes nothing
            assert all(tokens.shape == (microbatch or share, T + 1) for tokens in microbatches)
            result[step] += torch.cat(microbatches).tolist()
        assert loader.state_dict() == {"position": position + steps * batch, "shares": Shares()}
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4},
        {"microbatch": 3},
        {"ranks": 2, "microbatch": 2},
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
        global_batches(windows, 2, ranks=2) + global_batches(windows, 4, ranks=4, position=24)
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


def loader_of(windows, **more):
    sizes = {"global_batch_size": 12, "microbatch_size": 6, "rank": 0, "ranks": 1}
    return Loader(windows, seed=3, **sizes | more)


@pytest.fixture
def copied(split, tmp_path):
    """Windows whose shards may be harmed, and the files of these."""
    folder = shutil.copytree(split[0], tmp_path / "shards")
    windows = MixedWindows([Windows(folder, split[1], "uint16", T)])
    return windows, [folder / shard.file for shard in split[1].shards]


def truncate(file):
    os.truncate(file, 10)


@pytest.mark.parametrize(
    "harm,reason", [(truncate, "it is cut short"), (os.unlink, "No such file")]
)
def test_a_read_that_fails_is_told_with_file_and_place(copied, harm, reason, monkeypatch):
    """An error in the thread, and not a bus error."""
    windows, files = copied
    loader = loader_of(windows)
    for file in files:
        harm(file)
    message = rf"shards/train\S+bin cannot be read at byte \d+ \(.*{reason}.*\): restore it"
    with pytest.raises(UserError, match=message):
        loader.step()
    assert loader.position == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # the others wait for this rank, which has to end
    with pytest.raises(LoneMistake, match=message):
        loader.step()


def test_batches_that_were_read_before_the_failure_are_given_out(copied):
    windows, files = copied
    loader = loader_of(windows)
    before = loader.step()
    wait_for(lambda: loader._ahead._it._q.qsize() == 4)  # private: two steps have been read
    for file in files:
        truncate(file)
    ahead = [loader.step() for _ in range(2)]
    assert all(tokens.any() for batch in (before, *ahead) for tokens in batch)
    with pytest.raises(UserError):
        loader.step()
    assert loader.position == 36


def wait_for(true, seconds=600):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_reads_between_the_first_peek_and_the_end(windows):
    loader, before = loader_of(MixedWindows([windows])), threading.active_count()
    loader.load_state_dict({"position": 24, "shares": Shares()})
    assert threading.active_count() == before
    ahead = torch.cat(loader.peek())
    for end in (loader.close, close_all, partial(loader.load_state_dict, loader.state_dict())):
        assert threading.active_count() == before + 1
        end()
        assert threading.active_count() == before
        assert torch.equal(torch.cat(loader.peek()), ahead)  # nothing was consumed
    if not (child := os.fork()):
        os._exit(loader._ahead is not None)
    assert os.waitpid(child, 0)[1] == 0 and threading.active_count() == before
    dropped = loader_of(MixedWindows([windows]))
    dropped.peek()
    del dropped
    assert threading.active_count() == before


def test_the_thread_leaves_torchs_threads_alone(windows):
    """Later threads have as many as it lets them have: a reader of one would slow them all down."""
    loader, found, own = loader_of(MixedWindows([windows])), [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        loader.step()
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(own)
        loader.close()
    assert found == [3]


def test_for_a_gpu_the_thread_uses_it_first_and_pins(windows, monkeypatch):
    mixed, seen = MixedWindows([windows]), []
    batch = mixed.batch
    gpus = SimpleNamespace(set_device=lambda device: seen.append((device, current_thread())))
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpus)
    monkeypatch.setattr(mixed, "batch", lambda places, pinned: seen.append(pinned) or batch(places))
    loader = loader_of(mixed, device=torch.device("cuda", 3))
    loader.step()
    loader.close()
    (device, thread), pinned = seen[:2]
    assert device.index == 3 and thread is not current_thread() and pinned is True


def test_what_would_end_the_thread_is_told(windows, monkeypatch):
    mixed = MixedWindows([windows])
    monkeypatch.setattr(mixed, "batch", lambda places, pinned: sys.exit())
    loader = loader_of(mixed)
    with pytest.raises(SystemExit):
        loader.step()
    loader.close()


def test_errors_of_the_code_keep_their_traceback(windows, monkeypatch):
    mixed = MixedWindows([windows])
    monkeypatch.setattr(mixed, "batch", lambda places, pinned: {}["mistake"])
    with pytest.raises(KeyError) as raised:
        loader_of(mixed).step()
    assert raised.traceback[-1].name == "<lambda>"
