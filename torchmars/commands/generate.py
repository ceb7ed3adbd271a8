"""Sample text from a checkpoint."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from torchmars.checkpoint.inference import load_model
from torchmars.config.fields import Amount, Positive
from torchmars.core.bounds import Range
from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.options import parse
from torchmars.training.sampling import sample_text


@dataclass
class Generate:
    """Sample text from a checkpoint."""

    folder: Positional[Path]
    """A checkpoint, or a run, whose newest good checkpoint is taken."""
    prompt: str = "\n"
    """Text to continue."""
    max_tokens: Positive = 200
    """Tokens to sample at most."""
    temperature: Amount = 0.8
    """Divides the logits. 0 takes the likeliest token."""
    top_k: Positive | None = None
    """Sample from the k likeliest tokens only."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the sampling."""


def main() -> None:
    """Print what the model of a checkpoint continues a prompt with."""
    with exit_on_user_error():
        options = parse(Generate, sys.argv[1:], "torchmars generate")
        model, tokenizer, _ = load_model(options.folder)
        text = sample_text(
            lambda tokens: model.head(model(tokens)[:, -1]),
            model.seq_len,
            tokenizer,
            options.prompt,
            options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
        say(text)


if __name__ == "__main__":
    main()
