"""Text by a model: token after token, drawn from what it predicts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchmars.core.errors import UserError
from torchmars.data.tokenizer import Tokenizer

# From token ids [1, length] to the logits [1, vocab_rows] of the next one.
NextLogits = Callable[[Tensor], Tensor]
# Below this temperature, logits that are divided by it leave the range of float32.
COLD = 1e-4


@torch.no_grad()
def sample(
    next_logits: NextLogits,
    seq_len: int,
    tokens: list[int],
    count: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` token ids that continue `tokens`. The model sees the last `seq_len` of them.

    `temperature` divides the logits; 0 takes the likeliest token. `top_k` leaves only the k
    likeliest. Random numbers come from a CPU generator that belongs to the call: on a sharded
    model every rank, called alike, draws the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    context = list(tokens)
    for _ in range(count):
        window = torch.tensor([context[-seq_len:]])
        # Rows past the vocabulary are padding.
        logits = next_logits(window)[0, :vocab_size].float().cpu()
        context.append(_draw(logits, temperature, top_k, generator))
        yield context[-1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise UserError(
            "the model's output is not finite, its training has diverged: take an earlier "
            "checkpoint"
        )
    if temperature < COLD:
        return int(logits.argmax())
    if top_k is not None:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -float("inf")
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def sample_text(
    next_logits: NextLogits,
    seq_len: int,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    **options: Any,
) -> str:
    """Return `prompt` and its continuation: at most `count` tokens, to the end of a document.

    `options` are those of `sample`.
    """
    tokens = tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end_of_text]
    new = []
    for token in sample(
        next_logits, seq_len, tokens, count, vocab_size=tokenizer.vocab_size, **options
    ):
        if token == tokenizer.end_of_text:
            break
        new.append(token)
    return prompt + tokenizer.decode(new)
