"""Text by a model: token after token, drawn from its predictions."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torchmars.config.fields import Amount, Positive
from torchmars.core.check import Interval
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import Tokenizer
from torchmars.models.cache import Cache
from torchmars.models.model import Model

# From the tokens so far of each sequence to the logits [sequences, vocab_rows] of what follows.
Predict = Callable[[list[list[int]]], Tensor]
# Below this temperature, logits that are divided by it leave the range of float32.
COLD = 1e-4
UNKNOWN = "\ufffd"  # what the first bytes of a letter decode to


@dataclass(frozen=True)
class Draw:
    """How a token is drawn from logits."""

    temperature: Amount = 1.0
    """Divides the logits. 0 takes the likeliest token."""
    top_k: Positive | None = None
    """Only the k likeliest tokens are drawn."""
    top_p: Annotated[float, Interval(gt=0, le=1)] | None = None
    """Only the likeliest tokens are drawn, as few as have this probability together (Holtzman et
    al. 2020, arXiv 1904.09751, section 3.1)."""
    seed: int = 0
    """Of the first sequence. The next one has the next seed."""


def predict_with_cache(model: Model, capacity: int) -> Predict:
    """Return predictions of `model` for sequences that grow by a token from call to call.

    The model sees the last `capacity` tokens, at most its `seq_len`. Each call computes the new
    tokens alone. Where a sequence is longer than `capacity`, all the model sees moves, and is
    computed again.
    """
    cache = Cache(model, capacity)

    def predict(contexts: list[list[int]]) -> Tensor:
        longest = max(map(len, contexts))
        if cache.seen and cache.seen + 1 == longest <= capacity:
            return cache.go_on([context[-1] for context in contexts])
        return cache.start([context[-capacity:] for context in contexts])

    return predict


def predict_anew(next_logits: Callable[[Tensor], Tensor], seq_len: int) -> Predict:
    """Return predictions of a sharded model for a single sequence.

    `next_logits` is from token ids [1, length] to the logits [1, vocab_rows] of the next one.
    """
    return lambda contexts: next_logits(torch.tensor([contexts[0][-seq_len:]]))


@torch.no_grad()
def sample(
    predict: Predict,
    contexts: list[list[int]],
    count: int,
    *,
    vocab_size: int,
    ends: Collection[int] = (),
    draw: Draw = Draw(),
) -> Iterator[list[int | None]]:
    """Yield up to `count` times the token id that continues each of `contexts`.

    None stands for a sequence after one of the tokens `ends`. Random numbers come from CPU
    generators that belong to the call: on a sharded model every rank, called alike, draws the same
    tokens. A sequence is the same whatever the others are.
    """
    # Seeds wrap around within 64 bits.
    seeds = [(draw.seed + number + 2**63) % 2**64 - 2**63 for number in range(len(contexts))]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    contexts = [list(context) for context in contexts]
    ended = [False] * len(contexts)
    for _ in range(count):
        # Rows past the vocabulary are padding.
        logits = predict(contexts)[:, :vocab_size].float().cpu()
        tokens: list[int | None] = []
        for number, context in enumerate(contexts):
            context.append(draw_token(logits[number], draw, generators[number]))
            tokens.append(None if ended[number] else context[-1])
            ended[number] |= context[-1] in ends
        yield tokens
        if all(ended):
            return


def draw_token(logits: Tensor, draw: Draw, generator: torch.Generator) -> int:
    """Return a token id drawn from `logits` [vocabulary]. Raises `UserError` if they are none."""
    if not logits.isfinite().all():
        raise UserError(
            "the model's output is not finite, its training has diverged: take an earlier "
            "checkpoint"
        )
    if draw.temperature < COLD:
        return int(logits.argmax())
    if draw.top_k is not None:
        logits[logits < logits.topk(min(draw.top_k, len(logits))).values[-1]] = -torch.inf
    probabilities = (logits / draw.temperature).softmax(-1)
    if draw.top_p is not None:
        largest, order = probabilities.sort(descending=True)
        before = largest.cumsum(-1) - largest
        probabilities[order[before >= draw.top_p]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def continuations(
    predict: Predict,
    tokenizer: Tokenizer,
    prompts: list[str],
    count: int,
    draw: Draw,
    tell: Callable[[str], bool | None] = lambda piece: None,
) -> list[str]:
    """Return the continuation of each prompt: at most `count` tokens, to the end of a document.

    Of a single prompt, `tell` gets the pieces as they are drawn, and may say by True that it has
    enough. A letter of several tokens comes when it is whole.
    """
    contexts = [encode(tokenizer, prompt) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]
    said = 0
    for tokens in sample(
        predict, contexts, count, vocab_size=tokenizer.vocab_size, ends=tokenizer.ends, draw=draw
    ):
        for one, token in zip(new, tokens):
            one += [] if token is None else [token]
        if len(prompts) == 1:
            text = following(tokenizer, contexts[0], new[0])
            if not text.endswith(UNKNOWN):
                enough = tell(text[said:])
                said = max(said, len(text))
                if enough:
                    break
    texts = [following(tokenizer, *each) for each in zip(contexts, new)]
    tell(texts[0][said:])
    return texts


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a prompt; for an empty one, the start of a document."""
    tokens: list[int] = tokenizer.encode(prompt).tolist()
    return [*tokenizer.before, *tokens] or [tokenizer.begin]


def following(tokenizer: Tokenizer, context: list[int], new: Sequence[int]) -> str:
    """Return the text that the tokens after `context` add to the text of `context`.

    A token's text depends on those before: many decoders drop the blank that a text begins with. A
    token at the end that ends a document has none.
    """
    if new and new[-1] in tokenizer.ends:
        new = new[:-1]
    return tokenizer.decode([*context, *new])[len(tokenizer.decode(context)) :]
