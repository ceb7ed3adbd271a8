"""Mixtures of experts: a router sends each token to a few of many MLPs.

- No token is dropped: there is no capacity.
- No sum depends on the order of threads. Rows are permuted by gathers in both passes, and a token
  adds up its experts' outputs in the order of its choices.
- The experts of a block are three stacks of matrices. Their products are grouped (grouped.py).
- Routers compute in float32: a softmax, or sigmoids with a bias that only affects the choice.
- A router's own losses add gradients; the reported loss leaves them out (`with_losses`).

Sources: Shazeer et al. 2017 (arXiv 1701.06538); Jiang et al. 2024 (arXiv 2401.04088) for Mixtral;
Gale et al. 2022 (arXiv 2211.15841) for experts without a capacity; Wang et al. 2024 (arXiv
2408.15664) for a bias that balances; Dai et al. 2024 (arXiv 2401.06066) for shared experts;
DeepSeek-AI 2024 (arXiv 2412.19437) for groups of experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.models.grouped import grouped_mm

TINY = 1e-20  # added to the sum of weights: sigmoids may all be 0


def as_it_is(weight: Tensor) -> Tensor:
    """Return `weight`: how a rank that has no part of a layout takes the weights of experts.

    A layout replaces it, as the attribute `local` of routers and experts.
    """
    return weight


def at_home(experts: "Experts", rows: Tensor, counts: Tensor) -> Tensor:
    """Return the outputs of `experts`, all of which are here: `MoE.dispatch` on one rank.

    `rows` [rows, width] are sorted by expert; `counts` [experts] says how many each of them has.
    """
    outputs: Tensor = experts(rows, counts)
    return outputs


class Router(nn.Module):
    """Chooses each token's experts, by the largest scores.

    Scores are probabilities, by a softmax over all experts. Or each is a sigmoid, and a bias is
    added to choose by, not to weigh by: whoever moves it balances the experts' load.

    All is float32, whatever the model computes in: bfloat16 has ties that decide otherwise on
    another layout. `pressure` and `z_loss` are as in `with_losses`; whoever trains sets them.
    """

    pressure: Tensor | None = None
    z_loss = 0.0
    bias: Tensor | None
    """Added to sigmoids [experts], float32: not a parameter, since no gradient moves it."""

    def __init__(
        self,
        width: int,
        experts: int,
        used: int,
        normalize: bool,
        sigmoid: bool = False,
        scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
    ) -> None:
        """`normalize`: weights of a token are divided by their sum, and then times `scale`.

        `groups`: how many there are, and how many a token chooses, before experts in them. They are
        of sigmoids.
        """
        super().__init__()
        self.groups, self.groups_used = groups
        self.used, self.normalize, self.scale, self.local = used, normalize, scale, as_it_is
        # No nn.Linear: such layers are computed in float8 where that is asked for.
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.zeros(experts) if sigmoid else None)
        self.is_softmax = not sigmoid  # `param_groups` asks for it

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and numbers of the experts that tokens `x` [tokens, width] use.

        Both are [tokens, used], the first choice in front.
        """
        logits = F.linear(x.float(), self.local(self.weight).float())
        scores = logits.softmax(dim=-1) if self.bias is None else logits.sigmoid()
        scores = with_losses(scores, logits, self.pressure, self.z_loss)
        if self.bias is None:
            weights, chosen = scores.topk(self.used, dim=-1)
        else:
            chosen = self.in_groups(scores + self.bias).topk(self.used, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if self.normalize and self.used == 1:  # a quotient's gradient would be its rounding
            weights = weights * 0 + 1
        elif self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return weights * self.scale, chosen

    def in_groups(self, scores: Tensor) -> Tensor:
        """Return `scores` [tokens, experts] with -inf for experts of groups that are not chosen.

        Chosen are those with the largest sums of their two best scores.
        """
        if self.groups == 1:
            return scores
        of_groups = scores.unflatten(-1, (self.groups, -1))
        best = of_groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.groups_used, dim=-1).indices
        others = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return of_groups.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)


class Experts(nn.Module):
    """Many SwiGLU MLPs of one shape, as three stacks of matrices [experts, out, in]."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.local = as_it_is
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of `rows` [rows, width]: the first `counts[0]` of expert 0, ..."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up, proj = map(self.local, (self.gate, self.up, self.proj))
        inner = F.silu(grouped_mm(rows, gate, ends)) * grouped_mm(rows, up, ends)
        return grouped_mm(inner, proj, ends)


class MoE(nn.Module):
    """Takes the place of a block's MLP.

    Where `counted` [experts], int64, is set, it adds to that how many tokens chose each expert.
    What layouts and balance use of it, and so of another that a model's `routed` names: `counted`,
    `dispatch`, `shared`, `router` and `experts`. Of a router they use `weight` [experts, width],
    `bias`, `pressure` and `z_loss`, and the optimizer `is_softmax`. All parameters of `experts` are
    stacks [experts, ...]. Both pass each weight through their `local` before they compute with it.
    """

    counted: Tensor | None = None

    def __init__(
        self,
        width: int,
        experts: int,
        used: int,
        inner: int,
        normalize: bool,
        sigmoid: bool = False,
        scale: float = 1.0,
        shared: nn.Module | None = None,
        groups: tuple[int, int] = (1, 1),
    ) -> None:
        """`sigmoid`, `scale` and `groups` are as in `Router`. All tokens pass `shared` too."""
        super().__init__()
        self.dispatch: Callable[[Experts, Tensor, Tensor], Tensor] = at_home
        """How rows get to experts. Expert parallelism replaces it."""
        self.router = Router(width, experts, used, normalize, sigmoid, scale, groups)
        self.experts = Experts(width, experts, inner)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        # Rows by expert; rows of one expert stay in the order of tokens.
        order = chosen.flatten().argsort(stable=True)
        places = order.argsort()
        rows = TakenRows.apply(tokens, order // self.router.used, places)
        counts = self.counts(chosen)
        if self.counted is not None:
            self.counted.add_(counts)
        outputs = TakenRows.apply(self.dispatch(self.experts, rows, counts), places, order)
        each = outputs.unflatten(0, (-1, self.router.used))
        routed = (each * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)

    def counts(self, chosen: Tensor) -> Tensor:
        """Return how many tokens each expert is chosen by: [experts], int64."""
        experts = self.router.weight.shape[0]
        counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
        return counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


def with_losses(scores: Tensor, logits: Tensor, pressure: Tensor | None, z_loss: float) -> Tensor:
    """Return `scores`, whose gradient includes a router's own losses.

    `scores` and `logits` are [tokens, experts], float32. The losses are the product of `pressure`
    [experts] with the mean probability of each expert, and `z_loss` times the mean square of the
    logarithm of the softmax's denominator (Zoph et al. 2022, arXiv 2202.08906, equation 5). A
    probability is a token's score over the sum of its scores, as in DeepSeek-V3. None: no losses.
    """
    if pressure is None:
        return scores
    loss = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0).dot(pressure)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(dim=-1).square().mean()
    added: Tensor = AddedLoss.apply(scores, loss)
    return added


class AddedLoss(torch.autograd.Function):
    """Passes a tensor on, and lets a loss have the gradient 1, as a term of the model's has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())


class TakenRows(torch.autograd.Function):
    """Takes rows, each of them equally often; its gradients are added up by a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        """Return the rows `index` of `x`. `places` has where row 0 went, then row 1, ..."""
        ctx.save_for_backward(places)
        ctx.times = len(index) // max(len(x), 1)
        return x[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        taken = gradients[0][places]
        if ctx.times <= 1:  # 0: there are no rows
            return taken, None, None
        return taken.unflatten(0, (-1, ctx.times)).sum(dim=1), None, None
