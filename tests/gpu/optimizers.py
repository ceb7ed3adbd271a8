"""The optimizers' steps alone, on the weights of GPT-2 small."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tests.gpu.device import ON_GPU, sized
from tests.gpu.timing import Step, forget, timed
from tests.measurements.optimizer_step import (
    clip_then,
    copy_bandwidth,
    mars_traffic,
    model_with_gradients,
)
from torchmars.config.gpt2 import GPT2Args
from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES, MatrixRule

ARGS = sized(
    GPT2Args(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, seq_len=1024),
    GPT2Args(n_layer=1, n_head=2, n_embd=32, vocab_size=64, seq_len=16),
)


SHORT = ["mars-adamw", "adamw", "mars-m"]


def elements() -> Iterator[dict[str, Any]]:
    """Yield what a step takes of torch's AdamW and of each elementwise rule."""
    yield from rows(torchs_adamw, [name for name in RULES if not is_of_matrices(name)])


def matrices() -> Iterator[dict[str, Any]]:
    """Yield what a step takes of torch's Muon and of each rule of matrices."""
    yield from rows(torchs_muon, [name for name in RULES if is_of_matrices(name)])


def in_short() -> Iterator[dict[str, Any]]:
    """Yield what a step takes of torch's AdamW and of the rules in most use, compiled."""
    yield from rows(torchs_adamw, SHORT, [True])


def is_of_matrices(rule: str) -> bool:
    """Return whether a rule is one of matrices."""
    return isinstance(RULES[rule], MatrixRule)


def torchs_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW of a model."""
    return torch.optim.AdamW(model.parameters(), fused=True)


def torchs_muon(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's Muon of a model's hidden matrices."""
    matrices = [each for each in model.blocks.parameters() if each.ndim == 2]
    return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")


def rows(
    torchs: Callable[[nn.Module], torch.optim.Optimizer],
    rules: Sequence[str],
    forms: Sequence[bool] = (True, False),
) -> Iterator[dict[str, Any]]:
    """Yield what a step takes of torch's optimizer, and of `rules`, by whether it is compiled."""
    bandwidth = copy_bandwidth() if ON_GPU else None
    for name, compiled, step in contenders(torchs, rules, forms):
        found = timed(step, sized(20, 1))
        if name == "mars-adamw" and bandwidth:
            found["of copy speed"] = mars_traffic(ARGS) / found["busy, ms"] * 1e3 / bandwidth
        yield {"step": name, "kernels": "compiled" if compiled else "eager", **found}
        del step
        forget()


def contenders(
    torchs: Callable[[nn.Module], torch.optim.Optimizer],
    rules: Sequence[str],
    forms: Sequence[bool],
) -> Iterator[tuple[str, bool, Step]]:
    """Yield the name of each, whether it is compiled, and its step."""
    model = model_with_gradients(ARGS)
    theirs = torchs(model)
    yield f"clip_grad_norm_ + torch's {type(theirs).__name__}", False, clip_then(model, theirs)
    for compiled in forms:
        for name in rules:
            model = model_with_gradients(ARGS)
            groups = param_groups(model, name)
            yield name, compiled, MARS(groups, max_grad_norm=1.0, compile=compiled).step
