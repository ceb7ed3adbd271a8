"""`python -m torchmars.generate RUN_OR_CHECKPOINT --prompt TEXT`: sample text from a checkpoint."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from torchmars.checkpoint.manifest import NAME
from torchmars.checkpoint.resume import open_newest
from torchmars.checkpoint.state import model_state, read_index, read_tensors
from torchmars.config import Config
from torchmars.config_file import config_from_tables
from torchmars.console import say
from torchmars.data.tokenizer import TOKENIZERS, Tokenizer
from torchmars.errors import UserError, reported
from torchmars.models import build_model, model_args


@torch.no_grad()
def sample(model: nn.Module, tokens: list[int], count: int, *, vocab_size: int, temperature: float = 1.0,
           top_k: int | None = None, seed: int = 0, device: torch.device | str = "cpu") -> Iterator[int]:
    """`count` token ids that continue `tokens`, one by one; the model sees its last `seq_len` tokens.

    `temperature` divides the logits, 0 takes the likeliest token; `top_k` leaves only the k likeliest. Draws on the CPU from a
    generator of its own, so on a sharded model every rank, called alike, draws the same.
    """
    generator = torch.Generator().manual_seed(seed)
    context = list(tokens)
    for _ in range(count):
        window = torch.tensor([context[-model.args.seq_len:]], device=device)
        logits = model(window)[0, -1, :vocab_size].float().cpu()  # rows past the vocabulary are padding
        context.append(_draw(logits, temperature, top_k, generator))
        yield context[-1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
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


def load(folder: Path) -> tuple[nn.Module, Tokenizer, Config]:
    """The model of a checkpoint (or of a run's newest good one) on the CPU, its tokenizer and its config."""
    folder, manifest = open_newest(folder, warn=lambda text: say(text, error=True))
    config = config_from_tables(manifest.config, f"in {folder}/{NAME}")
    model = build_model(model_args(config.model, manifest.vocab_size, config.training.seq_len)).eval()
    read_index(folder)  # its own error is clearer than DCP's
    read_tensors(folder, model_state(model), group=None)
    return model, TOKENIZERS[config.data.tokenizer](), config


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torchmars.generate", description="Sample text from a checkpoint.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint, or a run, whose newest checkpoint is taken")
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--max_tokens", type=int, default=200, help="tokens to sample at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=None, help="sample from the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    args = parser.parse_args()
    with reported():
        for name, least in (("max_tokens", 1), ("temperature", 0), ("top_k", 1)):
            value = getattr(args, name)
            if value is not None and not value >= least:
                raise UserError(f"--{name} must be at least {least}, got {value}")
        model, tokenizer, _ = load(args.folder)
        print(sample_text(model, tokenizer, args.prompt, args.max_tokens, temperature=args.temperature, top_k=args.top_k,
                          seed=args.seed))


if __name__ == "__main__":
    main()
