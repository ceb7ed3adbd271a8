"""Whole steps of models, the loss alone, and Newton-Schulz alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.device import DEVICE, ON_GPU, sized
from tests.gpu.gaps import gaps
from tests.gpu.timing import Step, forget, kernels_of, timed
from torchmars.cluster import connection
from torchmars.config import (
    ActivationCheckpointConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
    model_config,
)
from torchmars.models import build_meta_model
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, param_groups
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.parallel.cuts import chunk_tokens
from torchmars.parallel.layout import Layout
from torchmars.parallel.loss import mean_loss
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.speed import Throughput, peak_flops

DTYPE = sized("bfloat16", "float32")
NANO = {"n_layer": 1, "n_head": 2, "n_embd": 32}
GPT2 = model_config(name="gpt2", size="small", **sized({}, NANO))
PLAIN = "plain loop, AdamW"


class Loop(NamedTuple):
    """A step of a training loop, in its parts."""

    passes: Step
    """Forward and backward."""
    optimizer: Step
    """With the clip."""
    rest: Step
    model: ParallelModel | nn.Module
    owner: torch.optim.Optimizer

    def step(self) -> None:
        """Make a step."""
        self.passes()
        self.optimizer()
        self.rest()


def ours(
    config: ModelConfig,
    rule: str,
    vocab_size: int,
    batch: int,
    length: int,
    activations: str = "none",
    dtype: str = DTYPE,
    layout: Layout | None = None,
) -> Loop:
    """Return the loop of torchmars, compiled: on one rank, if no `layout` says otherwise."""
    layout = layout or connection.start(ParallelismConfig())
    training = TrainingConfig(
        global_batch_size=batch * layout.data.size, seq_len=length, dtype=dtype, compile=True
    )
    model = ParallelModel(
        build_meta_model(config, vocab_size, length),
        ParallelismConfig(),
        training,
        ActivationCheckpointConfig(activations),
        layout,
        layout.device,
    )
    model.init_weights(0)
    groups = param_groups(model.whole, rule, lr=6e-4)
    for group in groups:
        group["params"] = [(name, model.weights[name]) for name, _ in group["params"]]
    optimizer = MARS(groups, max_grad_norm=1.0)
    windows = some_windows(vocab_size, batch, length)

    def rest() -> None:
        model.follow_weights()
        optimizer.zero_grad()

    return Loop(lambda: model.backward([windows]), optimizer.step, rest, model, optimizer)


def plain(
    config: ModelConfig, vocab_size: int, batch: int, length: int, dtype: str = DTYPE
) -> Loop:
    """Return the plainest loop around the same model, compiled, with autocast for bfloat16."""
    model = build_meta_model(config, vocab_size, length).to_empty(device=DEVICE)
    init_weights(model, 0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=6e-4, fused=True)
    windows = some_windows(vocab_size, batch, length)

    @torch.compile
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.head(model(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def passes() -> None:
        moved = windows.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_of(moved[:, :-1], moved[:, 1:])
        loss.backward()

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return Loop(passes, clip_and_step, optimizer.zero_grad, model, optimizer)


def some_windows(vocab_size: int, batch: int, length: int) -> torch.Tensor:
    """Return made-up token ids [batch, length + 1], on the host as a loader has them."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(vocab_size, (batch, length + 1), generator=generator)
    return windows.pin_memory() if ON_GPU else windows


def loops(
    config: ModelConfig,
    vocab_size: int,
    batches: list[int],
    length: int,
    rules: list[str],
    steps: int,
    activations: str = "none",
    with_gaps: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield what each loop reaches with each batch, and then when the GPU is idle in it."""
    vocab_size, length = sized((vocab_size, length), (64, 16))
    flops = build_meta_model(config, vocab_size, length).flops_per_token()
    for batch in sized(batches, [1]):
        for rule in rules:
            if rule == PLAIN:
                step = plain(config, vocab_size, batch, length).step
            else:
                step = ours(config, rule, vocab_size, batch, length, activations).step
            found = timed(step, sized(steps, 1))
            speed = batch * length / found["step, ms"] * 1e3
            mfu = Throughput(0, batch * length, flops, DEVICE, ranks=1).mfu(speed)
            yield {"batch": batch, "loop": rule, "tokens/s": speed, "MFU": mfu, **found}
            if with_gaps:
                yield from ({"loop": rule, **row} for row in gaps(step, 3))
            del step
            forget()


def gpt2_small() -> Iterator[dict[str, Any]]:
    """Yield what GPT-2 small reaches: first with 16 sequences of 1,024 tokens, then with others."""
    rules = [PLAIN, "adamw", "mars-adamw", "mars-m", "muon"]
    yield from loops(GPT2, 50304, [16], 1024, rules, 20)
    if ON_GPU:
        yield from loops(GPT2, 50304, [64, 8, 32], 1024, [PLAIN, "mars-adamw", "mars-m"], 10)


def gpt2_small_in_short() -> Iterator[dict[str, Any]]:
    """Yield what GPT-2 small reaches with 16 sequences of 1,024 tokens, and where it waits."""
    rules = [PLAIN, "mars-adamw", "adamw", "mars-m"]
    yield from loops(GPT2, 50304, [16], 1024, rules, 10, with_gaps=True)


def llama_1b() -> Iterator[dict[str, Any]]:
    """Yield what Llama 1B reaches, 4 sequences of 2,048 tokens."""
    config = model_config(name="llama", size=sized("1b", "nano"), **sized({}, NANO))
    yield from loops(config, 128256, [4], 2048, ["mars-adamw", "mars-m", PLAIN], 8)


def llama_8b_slice() -> Iterator[dict[str, Any]]:
    """Yield what four layers of the widths of Llama 8B reach, as its ranks compute them."""
    config = model_config(name="llama", size=sized("8b", "nano"), **sized({"n_layer": 4}, NANO))
    yield from loops(config, 128256, [2], 8192, ["mars-adamw", "mars-m"], 5, "selective")


def profile() -> Iterator[dict[str, Any]]:
    """Yield the kernels that a step of GPT-2 small spends most of its time in."""
    batch, length, vocab_size = sized((16, 1024, 50304), (1, 16, 64))
    for rule in ("mars-adamw", "mars-m"):
        step = ours(GPT2, rule, vocab_size, batch, length).step
        for _ in range(sized(4, 1)):
            step()
        kernels = sorted(kernels_of(step, sized(3, 1)).items(), key=lambda each: -each[1][0])
        for name, (milliseconds, count) in kernels[:20]:
            yield {"rule": rule, "kernel": name[:90], "ms": milliseconds, "launches": count}
        del step
        forget()


def losses() -> Iterator[dict[str, Any]]:
    """Yield what the loss of 16 x 1,024 tokens takes, with its gradients: ours and torch's."""
    tokens, width, rows = sized((16384, 768, 50304), (16, 8, 64))
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=getattr(torch, DTYPE))
    weight = torch.randn(rows, width, device=DEVICE, dtype=getattr(torch, DTYPE)) / width
    targets = torch.randint(rows, (tokens,), device=DEVICE)
    hidden.requires_grad_(), weight.requires_grad_()
    chunk = chunk_tokens(DEVICE.type, rows)

    def whole() -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    def in_chunks(compiled: bool) -> Callable[[], torch.Tensor]:
        return lambda: mean_loss(hidden[None], weight, targets[None], chunk, compile=compiled)

    variants = {
        "in chunks, compiled": in_chunks(True),
        "in chunks, eager": in_chunks(False),
        "whole, torch.compile": torch.compile(whole),
        "whole, eager": whole,
    }
    for name, loss_of in variants.items():
        hidden.grad = weight.grad = None
        yield {"loss": name, **timed(lambda of=loss_of: of().backward(), sized(20, 1))}
        forget()


def newton_schulz() -> Iterator[dict[str, Any]]:
    """Yield how fast matrices of Llama 8B and 70B are orthogonalised, in bfloat16."""
    for count, rows, cols in [
        *((1, 4096, 4096), (1, 14336, 4096), (8, 1024, 4096)),
        *((1, 8192, 8192), (1, 28672, 8192), (28, 768, 768)),
    ]:
        yield {"matrices": f"{count} x {rows} x {cols}", **orthogonalized((count, rows, cols))}


def newton_schulz_of_gpt2() -> Iterator[dict[str, Any]]:
    """Yield how fast all matrices of GPT-2 small are orthogonalised, in the batches of a step."""
    squares, tall = [(28, 768, 768), (20, 768, 768)], [(7, 3072, 768), (5, 3072, 768)]
    wide = [(count, cols, rows) for count, rows, cols in tall]
    yield {"matrices": "GPT-2 small", **orthogonalized(*squares, *tall, *wide)}


def orthogonalized(*batches: tuple[int, int, int]) -> dict[str, Any]:
    """Return how fast `batches` of matrices [n, rows, cols] are orthogonalised, one by one."""
    method, peak = ORTHOGONALIZERS["newton-schulz"], peak_flops(DEVICE)
    batches = sized(batches, tuple((count, r // 256, c // 256) for count, r, c in batches))
    matrices = [torch.randn(each, device=DEVICE, dtype=getattr(torch, DTYPE)) for each in batches]
    found = timed(lambda: [method(each) for each in matrices], sized(10, 1))
    flops = sum(count * method.flops(rows, cols) for count, rows, cols in batches)
    speed = flops / found["step, ms"] * 1e3
    return {"FLOP/s": speed, "of peak": speed / peak if peak else None, **found}
