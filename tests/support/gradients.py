"""Weights and gradients on layouts against those of one plain model."""

import dataclasses
from contextlib import nullcontext
from functools import cache, partial, partialmethod

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models.test_gpt2 import ARGS
from tests.models.test_latent import ARGS as LATENT
from tests.models.test_latent import DENSE
from tests.models.test_llama import ARGS as LLAMA
from tests.models.test_moe import EXPERTS, GLM
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models.deepseek import Deepseek
from torchmars.models.documents import document_starts
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama
from torchmars.parallel import cuts
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

WINDOWS = torch.randint(64, (8, 25), generator=torch.Generator().manual_seed(0))
END = 7  # where documents are kept apart, it begins one
WINDOWS[torch.rand(8, 25, generator=torch.Generator().manual_seed(1)) < 0.15] = END
WIDER = {"n_layer": 4, "n_head": 8, "n_embd": 64}
WIDE = dataclasses.replace(LLAMA, **WIDER, n_kv_head=4, qk_norm=True)
MODELS = {
    "gpt2": lambda: GPT2(dataclasses.replace(ARGS, n_layer=4)),
    "llama": lambda: Llama(dataclasses.replace(WIDE, qkv_bias=True)),
    "moe": lambda: Llama(dataclasses.replace(WIDE, **EXPERTS)),
    "glm": lambda: Llama(dataclasses.replace(WIDE, **EXPERTS, **GLM)),
    "deepseek": lambda: Deepseek(dataclasses.replace(LATENT, **WIDER)),
    "deepseek without latents of queries": lambda: Deepseek(
        dataclasses.replace(LATENT, **WIDER | DENSE, q_lora_rank=0)
    ),
}


@cache
def plain_gradients(name, apart=False):
    """Weights and gradients of the mean loss over WINDOWS in one plain model.

    `apart`: it gets one document after the other.
    """
    model = MODELS[name]()
    init_weights(model, seed=0)
    set_buffers(model.buffers())
    total = 0.0
    for windows in documents(WINDOWS) if apart else [WINDOWS]:
        logits, targets = model.head(model(windows[:, :-1])), windows[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        share = targets.numel() / WINDOWS[:, 1:].numel()
        (loss * share).backward()
        total += loss.item() * share
    return total, {name: (value.detach(), value.grad) for name, value in model.named_parameters()}


def set_buffers(buffers):
    """Let the biases of routers decide some choices."""
    for buffer in buffers:
        buffer.copy_(torch.linspace(-0.02, 0.02, len(buffer)))


def documents(windows):
    """The documents in `windows`, each as a window [1, length + 1] of its own."""
    for window in windows:
        begins = [0, *(place for place in range(1, len(window)) if window[place] == END)]
        for begin, end in zip(begins, [*begins[1:], len(window) - 1]):
            if begin < end:
                yield window[None, begin : end + 1]


def gradients_on(
    name,
    parallelism,
    training,
    activations,
    apart=False,
    one_unit_bytes=0,
    around=None,
    chunk=None,
    compile_loss=False,
):
    """The same of the parts of this rank: the mean loss, and weights and gradients gathered.

    By default blocks are units, as on GPUs and in larger models. `around` is a context of the
    backward pass, `chunk` the tokens of a chunk of the loss, and `compile_loss` compiles it alone.
    """
    layout, model, batch = model_on(name, parallelism, training, activations, apart, one_unit_bytes)
    for part in model.parts.values():
        part.chunk, part.compile_loss = chunk or part.chunk, compile_loss or part.compile_loss
    with around or nullcontext():
        loss = model.backward(batch)
    return layout.mean_loss(loss), gathered_gradients(model)


def model_on(name, parallelism, training, activations, apart=False, one_unit_bytes=0):
    """The layout, the model with its initial weights, and this rank's microbatches of WINDOWS."""
    cuts.ONE_UNIT_BYTES = one_unit_bytes
    world = torch.distributed.get_world_size()
    layout = Layout.create(torch.device("cpu"), parallelism.degrees(world))
    with torch.device("meta"):
        whole = MODELS[name]()
    model = ParallelModel(
        whole,
        parallelism,
        training,
        activations,
        layout,
        torch.device("cpu"),
        find_starts=partial(document_starts, end_of_text=END) if apart else None,
    )
    model.init_weights(seed=0)
    set_buffers(model.buffers.values())
    data = layout.data
    size, _ = training.microbatches(data.size, parallelism.stages)
    return layout, model, WINDOWS.chunk(data.size)[data.rank].split(size)


def gathered_gradients(model):
    """The weights of which this rank has a part, and their gradients, whole."""
    return {name: (gathered(value), gathered(value.grad)) for name, value in model.weights.items()}


def gathered(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def training_on(ranks, compile=False):
    """A rank has several microbatches where the batch has enough."""
    return TrainingConfig(
        global_batch_size=8,
        seq_len=24,
        dtype="float32",
        microbatch_size=8 // ranks // 2 or 1,
        compile=compile,
    )


def compare(results, where, plain):
    """Compare what ranks have found with one `plain` model's loss, weights and gradients."""
    expected_loss, expected = plain
    seen = set()
    for loss, found in results:
        assert loss == pytest.approx(expected_loss, rel=1e-6), where
        for weight, (value, gradient) in found.items():
            assert torch.equal(value, expected[weight][0]), (weight, where)
            error = (gradient - expected[weight][1]).norm() / expected[weight][1].norm()
            assert error < 1e-5, (weight, where)
        seen |= found.keys()
    assert seen == expected.keys(), where


def check_gradients(
    name, ranks, settings, activations=None, compile=False, function=gradients_on, apart=False
):
    """Let `function`, which is like `gradients_on`, run on ranks; compare with one plain model."""
    parallelism = ParallelismConfig(**settings)
    checkpointing = ActivationCheckpointConfig(**(activations or {}))
    training = training_on(ranks, compile)
    results = run_ranks(function, ranks, name, parallelism, training, checkpointing, apart)
    compare(results, settings, plain_gradients(name, apart))


def compiled_gradients_on(*args):
    """As `gradients_on`, with blocks that are traced and cut in two, but not made into code."""
    compiled = partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", compiled)
        return gradients_on(*args)
