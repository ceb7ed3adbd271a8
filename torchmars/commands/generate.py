"""`python -m torchmars.generate RUN_OR_CHECKPOINT --prompt TEXT`: sample text from a checkpoint."""

from argparse import ArgumentDefaultsHelpFormatter
from pathlib import Path

from torchmars.checkpoint.inference import load_model
from torchmars.core.console import say
from torchmars.core.errors import Arguments, UserError, reported
from torchmars.core.typed import Range, is_text
from torchmars.training.sampling import sample_text

BOUNDS = {
    "max_tokens": Range(1, 1_000_000_000),
    "temperature": Range(0, 1_000_000),
    "top_k": Range(1, 1_000_000_000),
    "seed": Range(-(2**63), 2**63 - 1),
}


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
        model, tokenizer, _ = load_model(args.folder)
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
