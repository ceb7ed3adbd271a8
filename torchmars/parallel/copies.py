"""A model on one rank: it computes with copies of its weights in another dtype, without FSDP."""

import torch
from torch import Tensor, nn


class Copies:
    """Copies of the weights of `model` in `dtype`, which take their place as its parameters.

    FSDP keeps such copies too where one rank has whole weights, and casts the same gradients in the
    same order. But it casts unit by unit, from hooks that take the host longer than the casts take
    a GPU. All is queued on the stream that computes, so no memory is given up too early.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        # A weight that two modules share has one copy: its gradients are added up in `dtype`.
        copies = {
            weight: nn.Parameter(torch.empty_like(weight, dtype=dtype))
            for weight in model.parameters()
        }
        if torch.__version__ >= "2.15":  # FSDP takes gradients as they come, also in float32
            for copy in copies.values():
                copy.grad_dtype = None
        for module in model.modules():
            for name, weight in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                setattr(module, name, copies[weight])
        self.weights: list[Tensor] = [*copies]
        self.copies: list[Tensor] = [*copies.values()]

    @torch.no_grad()
    def follow(self) -> None:
        """Take the values of the weights, after they have changed."""
        torch._foreach_copy_(self.copies, self.weights)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients of a backward pass to the weights' gradients, and drop them."""
        added: tuple[list[Tensor], list[Tensor]] = [], []
        first: tuple[list[Tensor], list[Tensor]] = [], []
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if copy.grad is None:  # the pass did not use it
                continue
            into = added
            if weight.grad is None:
                into, weight.grad = first, torch.empty_like(weight)
            into[0].append(weight.grad)
            into[1].append(copy.grad)
            copy.grad = None
        if first[0]:
            torch._foreach_copy_(*first)
        if added[0]:
            torch._foreach_add_(*added)
