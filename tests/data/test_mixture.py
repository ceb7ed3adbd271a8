"""Mixtures: shares, one order on every layout, and a change of weights that loses no window."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.order import place_of_sample
from tests.support.shards import write_shards
from torchmars.config import DataConfig
from torchmars.data.loader import Loader, validation_batches
from torchmars.data.order import Shares, shares_from_start
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import MixedWindows, Windows

T = 16
SAMPLES = 10_000


def off_the_weights(shares, samples):
    """Return how many samples each part is away from its share of the first `samples`."""
    total = sum(Fraction(str(weight)) for weight in shares.weights)
    return [
        abs(count - samples * Fraction(str(weight)) / total)
        for count, weight in zip(shares.counts(samples), shares.weights)
    ]


weightings = st.lists(
    st.one_of(st.integers(0, 100), st.floats(0, 1, allow_subnormal=False)), min_size=1, max_size=6
).filter(lambda weights: sum(weights) > 0)


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(weightings)
def test_shares_are_those_of_the_weights(weights):
    shares = shares_from_start(weights)
    for samples in (1, 7, 100, 3333, SAMPLES):
        assert sum(shares.counts(samples)) == samples
        assert max(off_the_weights(shares, samples)) <= len(weights)
    assert max(off_the_weights(shares, SAMPLES)) <= 0.001 * SAMPLES


@settings(derandomize=True, database=None, deadline=None, max_examples=30)
@given(st.data())
def test_weights_that_change_on_the_way_go_on_from_what_was_read(data):
    size = data.draw(st.integers(1, 4))
    one = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    shares, reached, sample = shares_from_start(data.draw(one)), [0] * size, 0
    for _ in range(3):
        for _ in range(data.draw(st.integers(0, 50))):
            [part], [number] = shares.parts_of(np.array([sample]))
            assert number == reached[part]
            reached[part] += 1
            sample += 1
        weights = data.draw(one)
        assert shares.counts(sample) == reached
        shares = shares.changed(weights, sample)


def test_weights_of_the_same_shares_are_no_change():
    shares = shares_from_start([0.5, 0.3, 0.2])
    assert shares.changed([5, 3, 2], 77) is shares
    assert shares.changed([5, 3, 1], 77) == Shares([5, 3, 1], 77, shares.counts(77))


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Training windows of three corpora, of 12, 40 and 90 documents."""
    parts = []
    for number, count in enumerate((12, 40, 90)):
        folder = tmp_path_factory.mktemp("mixture") / "shards"
        generator = np.random.default_rng(number)
        texts = (
            "".join(map(chr, generator.integers(32, 127, size=generator.integers(50, 100))))
            for _ in range(count)
        )
        manifest = write_shards(DataConfig(), ByteTokenizer(), texts, folder, shard_tokens=500)
        parts.append(Windows(folder, manifest.splits["train"], "uint16", T))
    return MixedWindows(parts)


WEIGHTS = [0.5, 0.3, 0.2]


def global_batches(windows, steps, shares, *, ranks=1, microbatch=None, position=0, batch=12):
    """Return the windows of each step in global order, put together from all ranks."""
    result = [[] for _ in range(steps)]
    for rank in range(ranks):
        loader = Loader(
            windows,
            seed=3,
            global_batch_size=batch,
            microbatch_size=microbatch or batch // ranks,
            rank=rank,
            ranks=ranks,
        )
        loader.load_state_dict({"position": position, "shares": shares})
        for step in range(steps):
            result[step] += torch.cat(loader.step()).tolist()
    return result


def place(windows, shares, sample):
    return place_of_sample(sample, shares, windows.lengths, 3)


@pytest.mark.parametrize("options", [{}, {"ranks": 2}, {"ranks": 4}, {"ranks": 2, "microbatch": 3}])
def test_the_same_windows_on_every_layout(windows, options):
    shares = shares_from_start(WEIGHTS)
    batches = global_batches(windows, 8, shares, **options)
    places = [place(windows, shares, sample) for sample in range(8 * 12)]
    expected = windows.batch(places).tolist()
    assert sum(batches, []) == expected
    assert len({tuple(map(tuple, batch)) for batch in batches}) == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumes_exactly_also_with_other_weights(windows, ranks):
    shares = shares_from_start(WEIGHTS)
    straight = global_batches(windows, 6, shares)
    same = shares.changed(WEIGHTS, 24)
    assert global_batches(windows, 4, same, ranks=ranks, position=24) == straight[2:]
    other = shares.changed([1, 1, 8], 24)
    assert global_batches(windows, 4, other, ranks=ranks, position=24) != straight[2:]


def test_each_window_of_a_part_is_read_once_an_epoch_across_changes_of_weights(windows):
    shares, read = shares_from_start(WEIGHTS), []
    for position, weights in ((0, WEIGHTS), (150, [1, 0, 3]), (301, [2, 5, 1]), (800, WEIGHTS)):
        shares = shares.changed(weights, position)
        end = {0: 150, 150: 301, 301: 800, 800: 2000}[position]
        read += [place(windows, shares, sample) for sample in range(position, end)]
    for part, length in enumerate(windows.lengths):
        mine = [window for number, window in read if number == part]
        assert len(mine) > length
        epochs = [mine[begin : begin + length] for begin in range(0, len(mine), length)]
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])


@pytest.mark.parametrize("count,batch,ranks", [(20, 3, 2), (64, 8, 1), (10_000, 8, 2)])
def test_validation_takes_windows_by_the_weights(windows, count, batch, ranks):
    found, batches = [], []
    for rank in range(ranks):
        share = list(validation_batches(windows, WEIGHTS, count, batch, rank, ranks))
        batches.append(len(share))
        for tokens, parts in share:
            assert tokens.shape == (batch, T + 1)
            found += list(zip(parts, map(tuple, tokens.tolist())))
    assert len(set(batches)) == 1 and len(set(found)) == len(found)
    counted = Counter(part for part, _ in found)
    wanted = shares_from_start(WEIGHTS).counts(count)
    expected = [min(each, length) for each, length in zip(wanted, windows.lengths)]
    assert [counted[part] for part in range(3)] == expected
