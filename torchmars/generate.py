"""`python -m torchmars.generate RUN_OR_CHECKPOINT --prompt TEXT`: sample text from a checkpoint."""

from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from torchmars.build import build_meta_model
from torchmars.checkpoint.manifest import NAME, DamagedCheckpoint
from torchmars.checkpoint.resume import open_newest
from torchmars.checkpoint.state import model_state, read_tensors, saved_shapes
from torchmars.config import Config
from torchmars.config_file import config_from_tables
from torchmars.console import say
from torchmars.data.tokenizer import TOKENIZERS, Tokenizer
from torchmars.errors import Arguments, UserError, reported
from torchmars.typed import Range, is_text

BOUNDS = {
    "max_tokens": Range(1, 1_000_000_000),
    "temperature": Range(0, 1_000_000),
    "top_k": Range(1, 1_000_000_000),
    "seed": Range(-(2**63), 2**63 - 1),
}
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


def load(folder: Path) -> tuple[nn.Module, Tokenizer, Config]:
    """The model of a checkpoint (or of a run's newest good one) on the CPU, its tokenizer and its config."""
    folder, manifest = open_newest(folder, warn=lambda text: say(text, error=True))
    config, saved = config_from_tables(manifest.config, f"in {folder}/{NAME}"), saved_shapes(folder)
    model = build_meta_model(config, manifest.vocab_size).eval()
    for name, value in model_state(model).items():  # before a model takes memory that is not there
        if saved.get(name) != tuple(value.shape):
            raise DamagedCheckpoint(
                f"{folder} does not have the model that its {NAME} describes: "
                f"{name} is not of shape {list(value.shape)}"
            )
    read_tensors(folder, model_state(model.to_empty(device="cpu")), group=None)
    return model, TOKENIZERS[config.data.tokenizer](), config


def main() -> None:
    parser = Arguments(
        prog="python -m torchmars.generate",
        description="Sample text from a checkpoint.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, help="a checkpoint, or a run, whose newest checkpoint is taken"
    )
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--max_tokens", type=int, default=200, help="tokens to sample at most")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="divides the logits; 0 takes the likeliest token",
    )
    parser.add_argument(
        "--top_k", type=int, default=None, help="sample from the k likeliest tokens only"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    with reported():
        args = parser.parse_args()
        for name, bounds in BOUNDS.items():
            if getattr(args, name) is not None:
                bounds.check(f"--{name}", getattr(args, name))
        if not is_text(args.prompt):
            raise UserError("--prompt must be Unicode text: write it in UTF-8")
        model, tokenizer, _ = load(args.folder)
        say(
            sample_text(
                model,
                tokenizer,
                args.prompt,
                args.max_tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                seed=args.seed,
            )
        )


if __name__ == "__main__":
    main()
