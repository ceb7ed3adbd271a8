"""Best-fit packing: every target once, documents whole where they can be, full windows."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shards import write_shards
from torchmars.config import DataConfig
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import PackedWindows, best_fit_windows, pack_shards, packing_file

END = 256


def windows_of(tokens, seq_len):
    return list(best_fit_windows(np.flatnonzero(tokens == END), len(tokens), seq_len))


def shard(lengths, cut_front, cut_back):
    """A shard of documents of these lengths. Each token but the ends of text is another one."""
    parts = [np.append(np.full(length, 0), END) for length in lengths]
    tokens = np.concatenate([[END], *parts])
    first = min(cut_front, len(tokens) - 1)
    tokens = tokens[first : max(first + 1, len(tokens) - cut_back)]
    return np.where(tokens == END, END, 1000 + np.arange(len(tokens)))


shards = st.builds(
    shard,
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=40),
    st.integers(0, 30),
    st.integers(0, 30),
)


@given(shards, st.integers(1, 20))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_windows_hold(tokens, seq_len):
    windows = windows_of(tokens, seq_len)
    assert len(windows) == (len(tokens) - 1) // seq_len
    used = np.zeros(len(tokens), dtype=int)
    for window in windows:
        assert sum(size for _, size in window) == seq_len
        for place, (start, size) in enumerate(window):
            assert size > 0
            used[start : start + size] += 1
            # What follows a piece in its window is what follows it in the shard.
            assert place == 0 or tokens[start] == END
            assert place == len(window) - 1 or tokens[start + size] == END
    assert used.max(initial=0) <= 1 and used[-1] == 0
    assert len(tokens) - 1 - used.sum() < seq_len
    assert windows == windows_of(tokens.copy(), seq_len)
    latest = {}  # window and first input of the latest piece of each document
    for number, window in enumerate(windows):
        for start, _ in window:
            document = np.count_nonzero(tokens[: start + 1] == END)
            before = latest.setdefault(document, (-1, -1))
            assert number > before[0] and start > before[1]
            latest[document] = number, start


def test_documents_are_cut_only_where_they_must_be():
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(400), 1.0, size=5000).astype(int)
    tokens = shard(lengths, 0, 0)
    ends = np.flatnonzero(tokens == END)
    for seq_len in (512, 2048):
        short = np.flatnonzero(lengths < seq_len) + 1
        packed = [start for window in windows_of(tokens, seq_len) for start, _ in window]
        stream = np.union1d(np.arange(0, len(tokens) - seq_len, seq_len), ends)
        cut, cut_in_stream = (
            np.bincount(np.searchsorted(ends, starts, side="right")) for starts in (packed, stream)
        )
        assert (cut[short] > 1).sum() < (cut_in_stream[short] > 1).sum() / 10


@pytest.fixture
def prepared(tmp_path):
    generator = np.random.default_rng(0)
    documents = [
        bytes(generator.integers(97, 123, size=size, dtype=np.uint8)).decode()
        for size in generator.integers(1, 150, size=90)
    ]
    folder = tmp_path / "shards"
    manifest = write_shards(DataConfig(), ByteTokenizer(), iter(documents), folder, 2000)
    return folder, manifest, documents


def open_packed(folder, manifest, seq_len=64):
    pack_shards(folder, manifest, seq_len)
    return PackedWindows(folder, manifest.splits["train"], manifest.dtype, seq_len)


def test_windows_are_read_as_they_were_packed(prepared):
    folder, manifest, documents = prepared
    windows = open_packed(folder, manifest)
    split = manifest.splits["train"]
    assert len(split.shards) > 2
    expected = []
    for part in split.shards:
        tokens = np.fromfile(folder / part.file, "<u2").astype(np.int64)
        for window in windows_of(tokens, 64):
            places = np.concatenate([np.arange(start, start + size) for start, size in window])
            expected.append(np.append(tokens[places], tokens[places[-1] + 1]).tolist())
    assert [windows[number].tolist() for number in range(len(windows))] == expected
    text = "|".join("".join(chr(token) for token in window) for window in expected)
    trained = [text for number, text in enumerate(documents) if number % 3 != 1]
    short = [text for text in trained if len(text) < 40]
    assert sum(document + chr(END) in text for document in short) > 0.8 * len(short)


def test_a_later_start_finds_what_was_packed(prepared):
    folder, manifest, _ = prepared
    open_packed(folder, manifest)
    files = [packing_file(folder, part, 64) for part in manifest.splits["train"].shards]
    stamps = [file.stat().st_mtime_ns for file in files]
    files[0].write_bytes(files[0].read_bytes()[:-8])
    windows = open_packed(folder, manifest)
    assert [file.stat().st_mtime_ns for file in files[1:]] == stamps[1:]
    with pytest.raises(UserError, match=r"cannot be read at byte \d+ \(it is cut short"):
        windows[windows.firsts[1] - 1]
    files[0].unlink()
    assert len(open_packed(folder, manifest)[windows.firsts[1] - 1]) == 65


def test_other_lengths_are_packed_apart_and_damaged_shards_not_at_all(prepared):
    folder, manifest, _ = prepared
    assert len(open_packed(folder, manifest, 64)) != len(open_packed(folder, manifest, 32))
    shutil.rmtree(folder / "best_fit-32")
    file = folder / manifest.splits["train"].shards[1].file
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match="train-00001.bin was altered"):
        open_packed(folder, manifest, 32)
