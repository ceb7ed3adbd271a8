"""The optimizers' steps alone, on the weights of GPT-2 small."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.device import ON_GPU, sized
from tests.gpu.timing import Step, forget, timed
from tests.measurements.optimizer_step import (
    clip_then,
    copy_bandwidth,
    mars_traffic,
    model_with_gradients,
)
from torchmars.models.gpt2 import GPT2Args
from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES, MatrixRule

ARGS = sized(
    GPT2Args(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, seq_len=1024),
    GPT2Args(n_layer=1, n_head=2, n_embd=32, vocab_size=64, seq_len=16),
)


def rows(kind: str) -> Iterator[dict[str, Any]]:
    """Yield what a step takes of torch's optimizer, and of each rule, compiled and eager.

    `kind` is "elements" or "matrices": rules of that kind.
    """
    bandwidth = copy_bandwidth() if ON_GPU else None
    for name, compiled, step in contenders(kind):
        found = timed(step, sized(20, 1))
        if name == "mars-adamw" and bandwidth:
            found["of copy speed"] = mars_traffic(ARGS) / found["busy, ms"] * 1e3 / bandwidth
        yield {"step": name, "kernels": "compiled" if compiled else "eager", **found}
        del step
        forget()


def contenders(kind: str) -> Iterator[tuple[str, bool, Step]]:
    """Yield the name of each, whether it is compiled, and its step."""
    model = model_with_gradients(ARGS)
    if kind == "elements":
        torchs = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        matrices = [each for each in model.blocks.parameters() if each.ndim == 2]
        torchs = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    yield f"clip_grad_norm_ + torch's {type(torchs).__name__}", False, clip_then(model, torchs)
    for compiled in (True, False):
        for name, rule in RULES.items():
            if isinstance(rule, MatrixRule) == (kind == "matrices"):
                model = model_with_gradients(ARGS)
                groups = param_groups(model, name)
                yield name, compiled, MARS(groups, max_grad_norm=1.0, compile=compiled).step
