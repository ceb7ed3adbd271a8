"""Log-likelihoods of texts after others, by a model on any layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.data.tokenizer import Tokenizer
from torchmars.exchange.saved_model import ComputeDtype, load_sharded_model
from torchmars.parallel.cuts import sequence_unit
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

Report = Callable[[int], None]  # is told how many more are done


@dataclass(frozen=True)
class Score:
    """A model's scores of a text after a context."""

    log_likelihood: float
    """The natural logarithm of its probability."""
    likeliest: bool
    """Whether each of its tokens is the likeliest one after those before."""


@dataclass(frozen=True)
class Tokens:
    """A text after a context: token ids, of which the last `count` are the text."""

    ids: list[int]
    count: int
    size: int | None = field(default=None, compare=False)
    """Bytes of the text in UTF-8; None if there are only tokens."""


class Scorer:
    """Scores texts by a model whose ranks share the work. Every rank makes the same calls.

    `batch_size` is the number of texts that a rank scores at once.
    """

    def __init__(
        self, model: ParallelModel, layout: Layout, tokenizer: Tokenizer, batch_size: int
    ) -> None:
        self.model, self.layout = model, layout
        self.tokenizer, self.batch_size = tokenizer, batch_size
        self.seq_len = model.whole.seq_len

    def score(self, pairs: Sequence[tuple[str, str]], report: Report) -> list[Score]:
        """Return the score of the second text of each pair, after the first one.

        `report` is told of each batch how many texts of all ranks it had.
        """
        return self.score_tokens([self.tokens(*pair) for pair in pairs], report)

    def score_tokens(
        self, texts: Sequence[Tokens], report: Report = lambda count: None
    ) -> list[Score]:
        """Return the scores of texts that are tokens, as `score` does."""
        # Texts of a batch are of about one length. The longest come first: if memory is short,
        # that shows at once.
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))
        sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=self.layout.device)
        data, stride = self.layout.data, self.batch_size * self.layout.data.size
        # The ranks of a sequence share lengths that are a multiple of this.
        unit = sequence_unit(self.model.sequence.ranks, self.model.tp)
        self.model.train(False)
        # Every length would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            for begin in range(0, len(order), stride):
                group = order[begin : begin + stride]
                length = math.ceil((len(texts[group[0]].ids) - 1) / unit) * unit
                mine = group[data.rank * self.batch_size :][: self.batch_size]
                # A sharded forward pass needs all ranks: one without texts repeats the first.
                found = self.batch([texts[number] for number in mine or group[:1]], length)
                for number, score in zip(mine, found):
                    sums[number] = score
                report(len(group))
        self.model.train()
        # The ranks of a tp group have the same sums. Other ranks have other parts, or zeros.
        dist.all_reduce(sums, group=self.layout.world.process_group)
        sums /= self.layout.group("tp").size
        return [
            Score(log_likelihood, round(hits) == text.count)
            for text, (log_likelihood, hits) in zip(texts, sums.tolist())
        ]

    def tokens(self, context: str, text: str) -> Tokens:
        """Return the tokens of a text after a context, as many as the model sees.

        Blanks at the end of the context count as the text's: tokens begin with them. An empty
        context is the token that begins a document; before others stands what the tokenizer puts
        there. All as in EleutherAI's harness.
        """
        kept = context.rstrip()
        before, whole = (
            each.tolist() for each in self.tokenizer.encode_batch([kept, context + text])
        )
        # The first token of a text may also have the end of its context.
        count = max(1, len(whole) - len(before))
        opening = self.tokenizer.before if context else []
        if not opening and not before:
            opening = [self.tokenizer.begin]
        ids = [*opening, *whole][-(self.seq_len + 1) :]
        return Tokens(ids, min(count, len(ids) - 1))

    def windows(self, text: str) -> list[Tokens]:
        """Return windows of a document in which each of its tokens is scored once.

        The model sees as many tokens as it can before them. The first token comes after what the
        tokenizer puts before a text, or else after the token that begins a document.
        """
        tokens, ends = self.tokenizer.encode_measured(text)
        opening = self.tokenizer.before or [self.tokenizer.begin]
        return windows_after(opening, tokens.tolist(), self.seq_len, ends)

    def batch(self, texts: list[Tokens], length: int) -> Tensor:
        """Return, for each text, this rank's part of its log-likelihood and of its count of tokens
        that are the likeliest, [texts, 2]."""
        windows = torch.zeros(len(texts), length + 1, dtype=torch.int64)
        counted = torch.zeros(len(texts), length, dtype=torch.bool)
        for row, text in enumerate(texts):
            windows[row, : len(text.ids)] = torch.tensor(text.ids)
            counted[row, len(text.ids) - 1 - text.count : len(text.ids) - 1] = True
        found = self.model.scores(windows)
        mine = self.model.sequence.of(counted).to(found.device)
        return (found.double() * mine[..., None]).sum(1)


def windows_after(
    opening: list[int], tokens: list[int], seq_len: int, ends: np.ndarray | None = None
) -> list[Tokens]:
    """Return windows in which each of `tokens` is scored once, by a model that sees `seq_len`.

    `ends` are the bytes of the text that end with each token.
    """
    ids = [*opening, *tokens]
    windows: list[Tokens] = []
    begin = len(opening)
    while begin < len(ids):
        end = min(begin + seq_len if windows else max(seq_len, begin) + 1, len(ids))
        size = None
        if ends is not None:
            first, last = begin - len(opening), end - len(opening)
            size = int(ends[last - 1] - (ends[first - 1] if first else 0))
        windows.append(Tokens(ids[max(0, end - seq_len - 1) : end], end - begin, size))
        begin = end
    return windows


def load_scorer(
    folder: PurePath, layout: Layout, dtype: ComputeDtype, batch_size: int, step: int | None = None
) -> Scorer:
    """Return a scorer by the model in `folder`, as `load_sharded_model` loads it."""
    model, tokenizer = load_sharded_model(folder, layout, dtype, step)
    return Scorer(model, layout, tokenizer, batch_size)
