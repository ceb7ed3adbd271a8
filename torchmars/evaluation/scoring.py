"""Log-likelihoods of texts, by a model on any layout, and the loss of files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.core.errors import UserError
from torchmars.core.files import read_bytes
from torchmars.data.corpus import matching_files
from torchmars.data.documents import Damage, decode, documents_of
from torchmars.data.tokenizer import Tokenizer
from torchmars.parallel.cuts import sequence_unit
from torchmars.parallel.parallel_model import ParallelModel

Report = Callable[[int], None]  # is told how many more are done
FULL = 1024  # tokens


@dataclass(frozen=True)
class Tokens:
    """A text after a context: token ids, of which the last `count` are the text."""

    ids: list[int]
    count: int
    size: float = field(default=0.0, compare=False)
    """Bytes of the text in UTF-8, where they were counted: each token has those of the mean one."""


class Scorer:
    """Scores texts by a model whose ranks share the work. Every rank makes the same calls.

    A rank scores `batch_size` texts of the model's length, at least `FULL`, at once, and of shorter
    ones as many as have as many tokens: where each operation is short, threads wait for each other.
    """

    def __init__(self, model: ParallelModel, tokenizer: Tokenizer, batch_size: int) -> None:
        self.model, self.layout, self.tokenizer = model, model.layout, tokenizer
        self.seq_len = model.whole.seq_len
        self.batch_tokens = batch_size * max(self.seq_len, FULL)

    def score(
        self, texts: Sequence[Tokens], report: Report = lambda count: None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text, and whether each of its tokens is the likeliest.

        `report` is told of each batch how many texts of all ranks it had.
        """
        # Texts of a batch are of about one length. The longest come first: if memory is short,
        # that shows at once.
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))
        sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=self.layout.device)
        data = self.layout.data
        # The ranks of a sequence share lengths that are a multiple of this.
        unit = sequence_unit(self.model.sequence.ranks, self.model.tp)
        self.model.train(False)
        # Every length would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            while order:
                length = math.ceil((len(texts[order[0]].ids) - 1) / unit) * unit
                each = min(self.batch_tokens // length, math.ceil(len(order) / data.size))
                group, order = order[: each * data.size], order[each * data.size :]
                mine = group[data.rank * each :][:each]
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
            (log_likelihood, round(hits) == text.count)
            for text, (log_likelihood, hits) in zip(texts, sums.tolist())
        ]

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


def windows_after(opening: list[int], tokens: list[int], seq_len: int) -> list[Tokens]:
    """Return windows in which each of `tokens` is scored once, by a model that sees `seq_len`.

    It sees as many tokens as it can before them.
    """
    ids = [*opening, *tokens]
    windows: list[Tokens] = []
    begin = len(opening)
    while begin < len(ids):
        end = min(begin + seq_len if windows else max(seq_len, begin) + 1, len(ids))
        windows.append(Tokens(ids[max(0, end - seq_len - 1) : end], end - begin))
        begin = end
    return windows


def windows_of_files(pattern: str, scorer: Scorer) -> list[Tokens]:
    """Return the windows of the text files that a path, a folder or a glob names.

    A line `<|endoftext|>` ends a document, whose first token comes after what the tokenizer puts
    before a text, or else after the token that begins a document. Raises `UserError`.
    """
    windows: list[Tokens] = []
    tokenizer = scorer.tokenizer
    opening, size = tokenizer.before or [tokenizer.begin], 0
    for file in matching_files(pattern, "text", "--text", scorer.layout.say):
        try:
            for _, content in documents_of([(1, read_bytes(file))], 2**30):
                text = decode(content)
                tokens = tokenizer.encode(text if text.strip() else "")
                windows += windows_after(opening, tokens.tolist(), scorer.seq_len)
                size += len(text.encode())
        except (OSError, Damage) as error:
            raise UserError(f"--text: cannot read {file}: {error}") from None
    if not windows:
        raise UserError(f"--text: {pattern} has no text")
    mean = size / sum(each.count for each in windows)
    return [replace(each, size=mean * each.count) for each in windows]


def measure_text(
    scorer: Scorer, windows: Sequence[Tokens], report: Report = lambda count: None
) -> dict[str, float]:
    """Return how well a model predicts the windows of a text, by name.

    `bytes` are those of the text itself in UTF-8, `loss` is in nats per token. `bits_per_byte` does
    not depend on the tokenizer. `report` is told how many windows were scored.
    """
    nats = -sum(found for found, _ in scorer.score(windows, report))
    tokens, size = sum(each.count for each in windows), round(sum(each.size for each in windows))
    return {
        "tokens": tokens,
        "bytes": size,
        "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700.0)),
        "bits_per_byte": nats / math.log(2) / size if size else math.nan,
    }


def measures_in_words(name: str, values: Mapping[str, float]) -> str:
    """Return measurements in a line, each with its standard error if it has one."""
    parts = []
    for measure, value in values.items():
        metric, comma, filtered = measure.partition(",")
        error = values.get(f"{metric}_stderr{comma}{filtered}")
        if not metric.endswith("_stderr"):
            digits = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            parts.append(f"{measure} {digits}" + ("" if error is None else f" ± {error:.4f}"))
    return f"{name} {', '.join(parts)}"
