"""Text by a model: token after token, drawn from what it predicts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchmars.core.errors import UserError
from torchmars.data.tokenizer import Tokenizer

COLD = 1e-4  # the temperature below which logits, divided by it, leave the range of float32


@torch.no_grad()
def sample(
    model: nn.Module,
    tokens: list[int],
    count: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """`count` token ids that continue `tokens`, one by one; the model sees its last `seq_len` tokens.

    `temperature` divides the logits, 0 takes the likeliest token; `top_k` leaves only the k likeliest. Draws on the CPU from a
    generator of its own, so on a sharded model every rank, called alike, draws the same.
    """
    generator = torch.Generator().manual_seed(seed)
    context = list(tokens)
    for _ in range(count):
        window = torch.tensor([context[-model.args.seq_len :]], device=device)
        logits = (
            model(window)[0, -1, :vocab_size].float().cpu()
        )  # rows past the vocabulary are padding
        context.append(_draw(logits, temperature, top_k, generator))
        yield context[-1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise UserError(
            "the model's output is not finite, its training has diverged: take an "
            "earlier checkpoint"
        )
    if temperature < COLD:
        return int(logits.argmax())
    if top_k is not None:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -float("inf")
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def sample_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, **options) -> str:
    """`prompt` and what the model makes of it: at most `count` tokens, up to the end of a document."""
    tokens = tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end_of_text]
    new = []
    for token in sample(model, tokens, count, vocab_size=tokenizer.vocab_size, **options):
        if token == tokenizer.end_of_text:
            break
        new.append(token)
    return prompt + tokenizer.decode(new)
