"""Activation checkpointing and compiled blocks: what is computed again, and the gradients."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15

from tests.models.test_llama import ARGS, model_of
from tests.models.test_moe import EXPERTS
from tests.support.full import FULL
from tests.support.gradients import (
    MODELS,
    WINDOWS,
    check_gradients,
    compiled_gradients_on,
    gradients_on,
    plain_gradients,
)
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models.initialize import init_weights
from torchmars.parallel.activations import checkpoint_blocks

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class OperationCounter(TorchDispatchMode):
    """Counts the operations of torch that run while it is active, by name."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:  # its parts come here
            return NotImplemented
        self.times[op._schema.name.removeprefix("aten::")] += 1
        return op(*args, **(kwargs or {}))


# Nothing is kept for the backward pass of what a block's last product gives. So of its four
# products three are made again.
@pytest.mark.parametrize(
    "options,computed_again",
    [
        ({}, {}),
        ({"mode": "full"}, {"gelu": 4, ATTENTION: 4, "mm": 4 * 3}),
        ({"mode": "selective"}, {"gelu": 4}),
    ],
)
def test_what_is_computed_again(options, computed_again):
    model = MODELS["gpt2"]()
    init_weights(model, seed=0)
    names = [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model, ActivationCheckpointConfig(**options))
    logits = model.head(model(WINDOWS[:, :-1]))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), WINDOWS[:, 1:].flatten())
    with OperationCounter() as backward:
        loss.backward()
    again = {
        "gelu": backward.times["gelu"],
        ATTENTION: backward.times[ATTENTION],
        # Two for each of the 4 matrices of a block, and two for the head.
        "mm": backward.times["mm"] - 2 * (4 * 4 + 1),
    }
    assert {name: times for name, times in again.items() if times} == computed_again
    assert [name for name, _ in model.named_parameters()] == names
    for name, (_, gradient) in plain_gradients("gpt2")[1].items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name


def kept_bytes(**options):
    """Bytes of the tensors that the forward pass keeps for the backward pass, weights aside."""
    model = MODELS["gpt2"]()
    checkpoint_blocks(model, ActivationCheckpointConfig(**options))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(WINDOWS[:, :-1])
    assert hidden.requires_grad
    return sum(size for place, size in kept.items() if place not in weights)


def test_checkpointing_keeps_less():
    block_input = WINDOWS[:, :-1].numel() * MODELS["gpt2"]().width * 4
    assert kept_bytes(mode="full") < 8 * block_input < kept_bytes() / 2


@pytest.mark.parametrize(
    "layout,mode",
    [
        pytest.param(
            layout,
            mode,
            marks=FULL if (layout, mode) == ("TP 2", "selective") else pytest.mark.slow,
        )
        for layout in LAYOUTS
        for mode in ("none", "full", "selective")
        if not (mode == "full" and "tp" in LAYOUTS[layout][1])
    ],
)
def test_gradients_of_compiled_blocks(layout, mode):
    options = {"mode": mode}
    check_gradients("gpt2", *LAYOUTS[layout], options, compile=True, function=compiled_gradients_on)


@pytest.mark.parametrize(
    "layout,mode,compile",
    [
        pytest.param("FSDP 2", "selective", True, marks=FULL),
        pytest.param("FSDP 2", "full", True, marks=pytest.mark.slow),
        pytest.param("CP 2", "selective", True, marks=pytest.mark.slow),
        pytest.param("CP 2 Ulysses", "full", False, marks=pytest.mark.slow),
        pytest.param("PP 2", "full", True, marks=pytest.mark.slow),
        pytest.param("TP 2", "selective", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_with_documents_apart(layout, mode, compile):
    function = compiled_gradients_on if compile else gradients_on
    check_gradients("llama", *LAYOUTS[layout], {"mode": mode}, compile, function, apart=True)


EXCHANGES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def exchanges(cases):
    """How often this rank exchanges activations and their gradients in a step of each case."""
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=8)
    found = []
    for name, settings, mode in cases:
        counter, checkpointing = OperationCounter(), ActivationCheckpointConfig(mode)
        gradients_on(name, ParallelismConfig(**settings), training, checkpointing, around=counter)
        found.append([counter.times[f"_c10d_functional::{each}"] for each in EXCHANGES])
    return found


def test_selective_keeps_what_ranks_have_exchanged():
    """But for all-gathers, which give as much as all ranks have: two in each of four blocks."""
    of_model = {"gpt2": {"tp": 2}, "llama": {"cp": 2, "cp_method": "ulysses"}}
    modes = ("none", "selective", "full")
    cases = [(name, settings, mode) for name, settings in of_model.items() for mode in modes]
    found, _ = run_ranks(exchanges, 2, cases)
    assert found[:3] == [[18, 18, 8], [26, 18, 8], [26, 22, 12]]
    assert found[3:] == [[0, 0, 32], [0, 0, 32], [0, 0, 48]]


def test_full_checkpointing_keeps_the_choices_of_routers():
    model = model_of(dataclasses.replace(ARGS, **EXPERTS))
    checkpoint_blocks(model, ActivationCheckpointConfig(mode="full"))
    loss = model.head(model(torch.randint(64, (2, 24)))).sum()
    with OperationCounter() as counter:
        loss.backward()
    assert counter.times["topk"] == 0 and counter.times["_softmax"] == model.n_layer
