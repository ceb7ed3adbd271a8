"""Cross-entropy straight from hidden states, a chunk of tokens at a time.

The logits of all tokens never lie in memory together. The vocabulary may be cut over the ranks of
a tp group.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def mean_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    z_loss: float = 0.0,
    compile: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of `targets` [...], a float32 scalar.

    The logits are the products of `hidden` [..., width] with `weight` [rows, width]. Both may be
    DTensors on a mesh of one axis, with `weight` cut by rows: no rank then gathers logits. The
    forward pass takes `chunk` tokens at a time, and forms the gradients at once.

    The gradient includes the z-loss's: `z_loss` times the mean of log(Z)^2, where Z is the sum
    of the exponentials of a token's logits (Chowdhery et al. 2022, arXiv 2204.02311, section 5).
    The value is without it, and so can be compared with a validation loss.

    With `compile` the operations between the products are compiled: they read and write less, and
    have no memory beside the logits.
    """
    loss: Tensor = _MeanLoss.apply(
        *_local(hidden, weight), targets.flatten(), chunk, z_loss, compile
    )
    return loss


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the loss of each target, float32 of the shape of `targets`, without a gradient.

    The arguments are those of `mean_loss`.
    """
    chunks = _chunks(*_local(hidden, weight), targets.flatten(), chunk)
    return torch.cat([each.losses for each in chunks]).view(targets.shape)


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return each target's log-likelihood, and 1 where it is the likeliest token, else 0.

    That is float32 [*targets.shape, 2]. The arguments are those of `mean_loss`.
    """
    chunks = _chunks(*_local(hidden, weight), targets.flatten(), chunk)
    scores = [torch.stack([-each.losses, each.likeliest()], dim=-1) for each in chunks]
    return torch.cat(scores).view(*targets.shape, 2)


class _MeanLoss(torch.autograd.Function):
    """The mean of the losses of all chunks. Three matrix products for each, as without chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup | None,
        targets: Tensor,
        chunk: int,
        z_loss: float,
        compile: bool,
    ) -> Tensor:
        losses = []
        of_states, of_weight = torch.empty_like(states), _Sum()
        for each in _chunks(states, weight, group, targets, chunk, compile):
            losses.append(each.losses)
            gradient = each.gradient(z_loss)
            torch.mm(gradient, weight, out=of_states[each.tokens])
            of_weight.add_product(gradient.t(), states[each.tokens], last=each.last)
        ctx.save_for_backward(of_states, of_weight.value)
        ctx.tokens = len(targets)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline that splits the backward pass calls this twice.
        scale = gradients[0] / ctx.tokens
        of_states, of_weight = ctx.saved_tensors
        return of_states * scale, of_weight * scale, None, None, None, None, None


class _Sum:
    """A sum of products of matrices, in float32, and in the dtype of the matrices at the end."""

    value: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor, last: bool) -> None:
        """Add a product; `last`: there will be no other."""
        if self.value is None:
            product = left @ right
            self.value = product if last else product.float()
        elif left.dtype == self.value.dtype:
            self.value.addmm_(left, right)
        else:
            self.value.add_(left @ right)
        if last:
            self.value = self.value.to(left.dtype)


@dataclass
class _Chunk:
    """The logits of some tokens, and the losses and gradients from them."""

    tokens: slice
    """Which tokens these are."""
    last: bool
    logits: Tensor
    """Of this rank's rows, [tokens, rows]."""
    probabilities: Tensor | None
    """Float32 [tokens, rows], as if there were no other rows. None if compiled."""
    largest: Tensor
    """The largest logit of these rows, float32."""
    total: Tensor
    """The sum of the exponentials of these rows' logits less the largest of them."""
    own: Tensor
    """The number of each target among this rank's rows; any, if another rank has it. [tokens]."""
    here: Tensor | None
    """Whether this rank has it, [tokens]. None: it has all rows."""
    losses: Tensor
    log_sum: Tensor
    """log(Z) of each token, float32."""
    part: Tensor | float
    """This rank's part of Z."""
    group: dist.ProcessGroup | None

    def gradient(self, z_loss: float) -> Tensor:
        """Return the gradient of the sum of the losses, in place of the logits.

        That is softmax(logits) - one_hot(target). Source: Shoeybi et al. 2019, arXiv 1909.08053,
        section 3.
        """
        found = self.probabilities
        if found is None:
            target = (self.own if self.here is None else self.own.where(self.here, -1)).int()
            softmax_gradient_(self.logits, self.largest, self._factor(z_loss) / self.total, target)
            return self.logits
        factor = self._factor(z_loss)
        if isinstance(factor, Tensor):
            found.mul_(factor[:, None])
        ones = torch.ones_like(self.losses) if self.here is None else self.here.to(found.dtype)
        found.scatter_add_(-1, self.own[:, None], -ones[:, None])
        return self.logits.copy_(found)

    def _factor(self, z_loss: float) -> Tensor | float:
        """Return the factor of each token's probabilities in the gradient."""
        return self.part * (1 + 2 * z_loss * self.log_sum) if z_loss else self.part

    def likeliest(self) -> Tensor:
        """Return 1 for each token whose target has the largest logit, else 0, in float32."""
        largest, place = self.logits.max(-1)
        found = place == self.own
        if self.here is None:
            return found.float()
        found &= self.here
        everywhere = largest.clone()
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=self.group)
        on_any = (found & (largest == everywhere)).float()
        dist.all_reduce(on_any, dist.ReduceOp.MAX, group=self.group)
        return on_any


def _local(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, dist.ProcessGroup | None]:
    """Return hidden states [tokens, width] and this rank's rows, and who has the others."""
    if not isinstance(weight, DTensor):
        return hidden.flatten(0, -2), weight, None
    assert isinstance(hidden, DTensor)
    # From its rows each rank has a part of the gradient of all hidden states.
    states = hidden.to_local(grad_placements=[Partial()]).flatten(0, -2)
    return states, weight.to_local(), weight.device_mesh.get_group()


def _chunks(
    states: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None,
    targets: Tensor,
    chunk: int,
    compile: bool = False,
) -> Iterator[_Chunk]:
    """Yield chunks of about equal size. Each uses the memory of the one before."""
    tokens, rows = len(targets), len(weight)
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    all_logits = states.new_empty(size, rows)
    all_probabilities = None if compile else torch.empty_like(all_logits, dtype=torch.float32)
    for begin in range(0, tokens, size):
        some = slice(begin, min(begin + size, tokens))
        length = some.stop - begin
        logits, probabilities = all_logits[:length], None
        torch.mm(states[some], weight.t(), out=logits)
        if all_probabilities is None:
            of_rows = softmax_sums(logits)
        else:
            probabilities, most = all_probabilities[:length], logits.amax(-1).float()
            torch.softmax(logits, -1, dtype=torch.float32, out=probabilities)
            of_rows = most, 1 / probabilities.amax(-1)  # sum(exp(logits - largest))
        largest, total = of_rows
        own = targets[some]
        here: Tensor | None = None
        part: Tensor | float = 1.0
        if group is not None:
            own = own - dist.get_rank(group) * rows
            here = (own >= 0) & (own < rows)
            own = own.clamp(0, rows - 1)
        of_target = logits.gather(-1, own[:, None])[:, 0].float() - largest
        if group is not None and here is not None:
            of_target = of_target.where(here, -torch.inf)
            largest, total, of_target, part = _over_ranks(largest, total, of_target, group)
        yield _Chunk(
            tokens=some,
            last=some.stop == tokens,
            logits=logits,
            probabilities=probabilities,
            largest=of_rows[0],
            total=of_rows[1],
            own=own,
            here=here,
            losses=total.log() - of_target,
            log_sum=largest + total.log(),
            part=part,
            group=group,
        )


def _over_ranks(
    largest: Tensor, total: Tensor, of_target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return these three of the whole vocabulary, and this rank's part of the total.

    `total` is the sum of the exponentials of the logits less `largest`. `of_target` is the target's
    logit less `largest`, and -inf where another rank has it.
    """
    rank = dist.get_rank(group)
    ranks = largest.new_zeros(dist.get_world_size(group), 3, len(largest))
    ranks[rank] = torch.stack([largest, total, of_target])
    dist.all_reduce(ranks, group=group)  # one collective for all three, of a few numbers
    maxima, totals, targets = ranks.unbind(1)
    most = maxima.amax(0)
    shifts = maxima - most
    totals = totals * shifts.exp()
    whole = totals.sum(0)
    return most, whole, (targets + shifts).amax(0), totals[rank] / whole


# The element-wise part of the loss, compiled: it reads logits twice, and writes them once. Both
# functions have no memory beside their arguments and results. Where a mode watches torch's
# operations, they are operations of torch's own kind, so that it sees that too. Elsewhere they are
# called as they are: torch's way there takes the host as long as they do.


def softmax_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and the sum of the exponentials of all less it; float32."""
    return _watched_sums(logits) if _is_watched() else _run(_sums, logits)


def softmax_gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    """Set logits to exp(logits - largest) * factor, less 1 at each row's target.

    The other tensors have a number for each row. The target, an int32, may be -1: none.
    """
    if _is_watched():
        _watched_gradient_(logits, largest, factor, target)
    else:
        _run(_gradient_, logits, largest, factor, target)


def _is_watched() -> bool:
    """Return whether a mode observes or replaces torch's operations."""
    return torch._C._len_torch_dispatch_stack() > 0  # private, torch 2.11 to 2.15


@torch.library.custom_op("torchmars::softmax_sums", mutates_args=())
def _watched_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    return _run(_sums, logits)


@_watched_sums.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits.new_empty(len(logits), dtype=torch.float32)
    return largest, torch.empty_like(largest)


@torch.library.custom_op("torchmars::softmax_gradient_", mutates_args={"logits"})
def _watched_gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    _run(_gradient_, logits, largest, factor, target)


@_watched_gradient_.register_fake
def _(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None: ...


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    # In this form, with both dims kept, torch's compiler knows how to read once on a GPU.
    values = logits.float()
    largest = values.amax(-1, keepdim=True)
    total = (values - largest).exp().sum(-1, keepdim=True)
    return largest[:, 0], total[:, 0]


def _gradient_(logits: Tensor, largest: Tensor, factor: Tensor, target: Tensor) -> None:
    columns = torch.arange(logits.shape[1], dtype=target.dtype, device=logits.device)
    softmax = (logits.float() - largest[:, None]).exp() * factor[:, None]
    logits.copy_(softmax - (columns == target[:, None]).float())


def _run(kernel: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call a compiled kernel. All numbers of rows share one."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(kernel)(*tensors)


@functools.cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, fullgraph=True)
