"""Sample text from a model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

from torchmars.config.fields import Amount, Count, Positive
from torchmars.config.plugins import PluginOptions
from torchmars.core.check import Interval
from torchmars.core.cli import Positional, parse
from torchmars.core.console import say, write
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import read_text

SEPARATOR = "-" * 15


@dataclass
class Generate(PluginOptions):
    """Sample text from a model.

    It is printed as it is drawn, to the end of a document. A terminal gets control characters as
    escapes, a file or a pipe gets the exact text.
    """

    folder: Positional[PurePath]
    """A checkpoint, a run, whose newest good checkpoint is taken, or a folder of transformers.
    hf:NAME is a model of the hub."""
    step: Count | None = None
    """Of a run, take the checkpoint of this step."""
    prompt: str = "\n"
    """Text to continue. Default: a line break."""
    prompts: Path | None = None
    """Instead of a prompt: a file with one in each line. All are continued together. Each is
    printed as a line of JSON, {"prompt": ..., "text": ...}."""
    samples: Positive = 1
    """Continuations of each prompt, each with the next seed. Lines of dashes part them."""
    max_tokens: Positive = 200
    """Tokens to sample at most."""
    temperature: Amount = 0.8
    """Divides the logits. 0 takes the likeliest token."""
    top_k: Positive | None = None
    """Sample from the k likeliest tokens only."""
    top_p: Annotated[float, Interval(gt=0, le=1)] | None = None
    """Sample only from the likeliest tokens, as few as have this probability together."""
    seed: Annotated[int, Interval(-(2**63), 2**63 - 1)] = 0
    """Seed of the sampling. With a file of prompts, the seed of the first one."""


def main() -> None:
    """Print a model's continuations of prompts."""
    with exit_on_user_error():
        options, _ = parse(Generate, sys.argv[1:], "torchmars generate")
        prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts)
        prompts = [prompt for prompt in prompts for _ in range(options.samples)]
        from torchmars.core.device import gpu_type
        from torchmars.evaluation import sampling
        from torchmars.exchange import saved_model

        model, tokenizer, _ = saved_model.load_model(options.folder, options.step)
        model.to(gpu_type() or "cpu")
        longest = max(len(sampling.encode(tokenizer, prompt)) for prompt in prompts)
        room = min(model.seq_len, longest + options.max_tokens)
        predict = sampling.predict_with_cache(model, room)
        draw = sampling.Draw(options.temperature, options.top_k, options.top_p, options.seed)
        if options.prompts is None and options.samples == 1:
            write(options.prompt)
            sampling.continuations(predict, tokenizer, prompts, options.max_tokens, draw, write)
            say("")
            return
        texts = sampling.continuations(predict, tokenizer, prompts, options.max_tokens, draw)
        for number, (prompt, text) in enumerate(zip(prompts, texts)):
            if options.prompts is None:
                write(f"{SEPARATOR}\n" * (number > 0) + f"{prompt}{text}\n")
            else:
                write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


def read_prompts(file: Path) -> list[str]:
    """Return the lines of a file. Raises `UserError` if there are none.

    A line ends at a newline alone: a prompt may have other characters that end a line.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts: cannot read {file}: {error}") from None
    if not text:
        raise UserError(f"--prompts: {file} has no line")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
