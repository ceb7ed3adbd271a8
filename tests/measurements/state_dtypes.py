"""Measure what a momentum and a last gradient in bfloat16 cost in loss.

python -m tests.measurements.state_dtypes [--steps 300] [--seeds 3] [--rules mars-adamw mars-m]

It trains the same small GPT-2 on the bytes of Python's standard library, with the state in float32
and in bfloat16. Of each rule and kind it prints the final validation loss of each seed, their mean
and standard deviation, and the differences to float32 with the same seed, by their mean and
standard deviation. A seed draws the weights and the batches.
"""

import argparse
import statistics
import sys

import numpy as np
import torch
from torch import Tensor

from torchmars.config.gpt2 import GPT2Args
from torchmars.data.corpus import _stdlib_files
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, lr_factor, param_groups

BFLOAT16 = {"momentum_dtype": torch.bfloat16, "last_grad_dtype": torch.bfloat16}
KINDS = {
    "float32": {},
    "bfloat16": BFLOAT16,
}
LR, WARMUP, FLOOR = 2e-3, 20, 0.05


def read_bytes() -> tuple[Tensor, Tensor]:
    """Return the bytes of training and of validation: every 20th file."""
    files = [np.frombuffer(file.read_bytes(), np.uint8) for file in _stdlib_files()]
    parts = [
        np.concatenate([each for number, each in enumerate(files) if (number % 20 == 0) == held])
        for held in (False, True)
    ]
    return torch.from_numpy(parts[0]).long(), torch.from_numpy(parts[1]).long()


def loss_of(model: GPT2, windows: Tensor) -> Tensor:
    """Return the mean loss of `windows` [batch, length + 1]."""
    logits = model.head(model(windows[:, :-1]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def final_loss(
    rule: str, settings: dict, seed: int, args: GPT2Args, steps: int, batch: int
) -> float:
    """Train a model and return its validation loss."""
    training, validation = TEXT
    generator = torch.Generator().manual_seed(seed)
    model = GPT2(args)
    init_weights(model, seed)
    optimizer = MARS(param_groups(model, rule, lr=LR), max_grad_norm=1.0, **settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    span = torch.arange(args.seq_len + 1)
    for step in range(1, steps + 1):
        factor = lr_factor(step, steps, warmup_steps=WARMUP, floor=FLOOR)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * factor
        begins = torch.randint(len(training) - len(span), (batch,), generator=generator)
        loss_of(model, training[begins[:, None] + span]).backward()
        optimizer.step()
        optimizer.zero_grad()
    windows = validation[: 512 * len(span)].view(-1, len(span))
    with torch.no_grad():
        return statistics.mean(loss_of(model, each).item() for each in windows.split(32))


def spread(values: list[float], form: str) -> str:
    """Return the mean and, of several values, the standard deviation."""
    deviation = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", nargs="+", default=["mars-adamw", "mars-m"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    args = GPT2Args(
        n_layer=options.layers, n_head=4, n_embd=options.width, vocab_size=256, seq_len=128
    )
    print("| rule | state | loss of each seed | mean (deviation) | over float32 (deviation) |")
    print("|---" * 5 + "|", flush=True)
    for rule in options.rules:
        losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for seed in range(options.seeds):
            for kind, settings in KINDS.items():
                each = final_loss(rule, settings, seed, args, options.steps, options.batch)
                losses[kind].append(each)
                print(f"{rule}, {kind}, seed {seed}: {each:.4f}", file=sys.stderr, flush=True)
        for kind, each in losses.items():
            apart = [one - other for one, other in zip(each, losses["float32"])]
            print(
                f"| {rule} | {kind} | {' '.join(f'{loss:.4f}' for loss in each)} "
                f"| {spread(each, '.4f')} | {spread(apart, '+.4f')} |",
                flush=True,
            )


if __name__ == "__main__":
    TEXT = read_bytes()
    main()
