"""Activation checkpointing: blocks that recompute dropped activations in the backward pass.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers those operations; private, likewise
import torch.nn.attention.varlen  # registers the operation of varlen_attn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchmars.config import ActivationCheckpointConfig
from torchmars.models import Model

# "selective" keeps these: results that are costly to compute for their size. Which operation
# attention is depends on the device, the dtype and the mask.
KEPT_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.torchmars.grouped_mm.default,
    torch.ops.aten.topk.default,
    torch.ops.aten._efficient_attention_forward.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.torch_attn._varlen_attn.default,  # private, torch 2.11 to 2.15: that of varlen_attn
    # Of tensor and context parallelism. Not all-gathers: their results are as large as all that the
    # ranks have. With those "selective" took more memory than "none", of a Llama of 8B on tp = 8.
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]


def checkpoint_blocks(
    model: Model, config: ActivationCheckpointConfig, experts_apart: bool = False
) -> None:
    """Let the blocks of `model` recompute what they do not keep, in place.

    Names of parameters stay as they are. `experts_apart`: experts will be units of FSDP within
    blocks, which are not compiled whole.
    """
    if config.mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.dropout > 0}
    contexts = contexts_of_some if experts_apart else create_selective_checkpoint_contexts
    if config.mode == "selective":
        options["context_fn"] = partial(contexts, KEPT_OPERATIONS)
    elif model.routed():
        # A router's near tie may fall otherwise the second time.
        options["context_fn"] = partial(contexts, [torch.ops.aten.topk.default])
    for block in model.blocks.values():
        checkpoint_block(block, options)


def contexts_of_some(operations: list[Any]) -> tuple["SomeOperations", "SomeOperations"]:
    """Return what `create_selective_checkpoint_contexts` does, but blind to other operations.

    torch 2.13 wants to see each operation as often the second time as the first. Those of FSDP are
    not: what is still gathered is not gathered again.
    """
    first, again = create_selective_checkpoint_contexts(operations)
    return SomeOperations(first, operations), SomeOperations(again, operations)


class SomeOperations(TorchDispatchMode):
    """A dispatch mode that sees some operations only."""

    def __init__(self, mode: TorchDispatchMode, operations: list[Any]) -> None:
        super().__init__()
        self.mode, self.operations = mode, frozenset(operations)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled modules run within: torch asks modes of checkpointing for this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operations:
            return self.mode.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def checkpoint_block(block: nn.Module, options: dict[str, Any]) -> None:
    """Put `torch.utils.checkpoint.checkpoint` with its `options` around a block's forward pass."""
    forward = block.forward

    def checkpointed(*args: Any) -> Any:
        return checkpoint(forward, *args, **options)

    block.forward = checkpointed
