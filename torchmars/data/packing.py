"""Best-fit packing: windows filled with documents that fit, so that few documents are cut.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830. Theirs
leaves padding in windows. Here all windows are full: a gap that no document fits is filled by
cutting one.

A document's tokens as inputs are the end-of-text token before it and all of its own. Their targets
are its own tokens and the end-of-text token after it. Where documents begin with a token of their
own, they go from that token to the end-of-text token, and the target of that one is the next such
token. So documents can follow each other in a window in any order, and every target is the token
that follows in the shard.
"""

from collections.abc import Iterator

import numpy as np

Span = tuple[int, int]  # the first of some inputs in a shard, and how many there are


def best_fit_windows(begins: np.ndarray, tokens: int, seq_len: int) -> Iterator[list[Span]]:
    """Yield the windows of a shard of `tokens` tokens: spans of `seq_len` inputs in all.

    `begins` are the places where its documents begin, sorted. Only the first span of a window may
    begin inside a document, and only the last one may end inside one. No input is in two spans.
    Less than `seq_len` are in none, so the number of windows is `(tokens - 1) // seq_len`.
    """
    if not len(begins):
        yield from alone(0, tokens - 1, seq_len)
        return
    # A shard may begin inside a document, and end inside one. The end of a window is the only place
    # for that one, so it is kept for the last gap.
    rest, last = (0, int(begins[0])), (int(begins[-1]), tokens - 1 - int(begins[-1]))
    whole = WholeDocuments(begins[:-1], np.diff(begins), seq_len)
    window: list[Span] = []
    gap = 0
    while rest[1] or whole.left:
        start, length = rest if rest[1] else whole.take(whole.longest)
        yield from alone(start, length, seq_len)
        rest, left = (0, 0), length % seq_len
        if not left:
            continue
        window, gap = [(start + length - left, left)], seq_len - left
        while gap and (fitting := whole.best_fit(gap)):
            window.append(whole.take(fitting))
            gap -= fitting
        if gap and whole.left:
            start, length = whole.take(whole.longest)
            window.append((start, gap))
            rest, gap = (start + gap, length - gap), 0
        if not gap:
            yield window
    start, length = last
    if gap > length:
        return
    if gap:
        yield [*window, (start, gap)]
    yield from alone(start + gap, length - gap, seq_len)


def alone(start: int, length: int, seq_len: int) -> Iterator[list[Span]]:
    """Yield the windows that some inputs fill without others."""
    for first in range(start, start + length - seq_len + 1, seq_len):
        yield [(first, seq_len)]


class WholeDocuments:
    """The whole documents of a shard that are not packed yet, by length."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        self.order = np.argsort(lengths, kind="stable")
        self.starts, self.lengths, self.seq_len = starts, lengths, seq_len
        short = lengths[lengths <= seq_len]
        self.left, self.short = len(lengths), len(short)
        self.long = self.left - self.short
        self.counts: list[int] = np.bincount(short, minlength=seq_len + 1).tolist()
        self.firsts: list[int] = np.cumsum([0, *self.counts]).tolist()
        # Sets of lengths as the bits of an integer, whose operations are fast: bit n of `present`
        # says whether there is a document of length n, and bit seq_len - n of `mirrored` too.
        self.present = self.mirrored = 0
        for length, count in enumerate(self.counts):
            if count:
                self._toggle(length)

    @property
    def longest(self) -> int:
        """The length of the longest document that is left."""
        if self.long:
            return int(self.lengths[self.order[self.short + self.long - 1]])
        return self.present.bit_length() - 1

    def best_fit(self, gap: int) -> int:
        """Return the length of the document to put into a gap; 0 if none fits.

        It is the one that fills the gap; else the longest that fills it with one more; else the
        longest that fits.
        """
        if self.present >> gap & 1:
            return gap
        pairs = self.present & self.mirrored >> (self.seq_len - gap)
        half, odd = divmod(gap, 2)
        if not odd and self.counts[half] == 1:
            pairs &= ~(1 << half)
        fitting = pairs or self.present & (1 << gap) - 1
        return max(0, fitting.bit_length() - 1)

    def take(self, length: int) -> Span:
        """Take out a document of a length; return its inputs."""
        if length > self.seq_len:
            self.long -= 1
            place = self.order[self.short + self.long]
        else:
            self.counts[length] -= 1
            place = self.order[self.firsts[length] + self.counts[length]]
            if not self.counts[length]:
                self._toggle(length)
        self.left -= 1
        return int(self.starts[place]), length

    def _toggle(self, length: int) -> None:
        self.present ^= 1 << length
        self.mirrored ^= 1 << (self.seq_len - length)
