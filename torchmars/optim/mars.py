"""MARS: AdamW on a clipped, variance-reduced gradient, on whole tensors or on shards of them.

Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large Models", ICML 2025,
arXiv 2411.10438, algorithm 2 (approximate form).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.elementwise import adamw_, clip_divisors, correct_, squared_norms
from torchmars.optim.norms import ShardSum

RULES = ("mars-adamw", "adamw")


def check_hyperparameters(suffix: str = "", **values: Any) -> None:
    """Raise `ValueError`, naming the argument (with `suffix`), for a hyperparameter out of its range.

    Knows lr, eps (> 0), weight_decay, gamma (>= 0), betas (two numbers in [0, 1)) and clip (> 0 or None).
    """
    for name, value in values.items():
        if name == "betas":
            good, wanted = len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"
        elif name == "eps":
            good, wanted = value > 0, "more than 0"
        elif name == "clip":
            good, wanted = value is None or value > 0, "more than 0, or None for no clip"
        else:
            good, wanted = 0 <= value < float("inf"), "at least 0"
        if not good:
            raise ValueError(f"{name}{suffix} must be {wanted}, got {value}")


class MARS(torch.optim.Optimizer):
    """AdamW on the gradient corrected by its change since the last step.

    For each parameter x with gradient g, last gradient h (h = g at the first step) and kappa = gamma b1 / (1 - b1):

        c = g + kappa (g - h);   c <- c min(1, clip / ||c||)
        m = b1 m + (1 - b1) c;   v = b2 v + (1 - b2) c^2
        x <- x - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay x)

    `||c||` is the norm of the whole tensor. Parameters may be plain tensors, replicas (DDP) or DTensors of any mesh and
    placement: a step makes one all-reduce for each distinct set of mesh dimensions that parameters are sharded over,
    and never waits for the device. Creating the optimizer is then collective too. State is created here, not at the first
    step: "step", "exp_avg", "exp_avg_sq" and "last_grad" (which never shares memory with a gradient).

    Args:
        params: parameters, named parameters or groups of them, as for any `torch.optim.Optimizer`. A group may set each
            of the arguments below.
        lr: learning rate.
        betas: decay of the momentum and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, multiplied by lr.
        gamma: strength of the variance reduction; 0 leaves the gradient as it is.
        clip: norm to which each tensor's corrected gradient is clipped; None switches it off.
        rule: "mars-adamw", or "adamw" for plain AdamW without correction, clip and last gradient.

    Raises `ValueError`, naming the argument, for a value out of range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 6e-3, betas: tuple[float, float] = (0.95, 0.99),
                 eps: float = 1e-8, weight_decay: float = 0.0, *, gamma: float = 0.025, clip: float | None = 1.0,
                 rule: str = "mars-adamw") -> None:
        self._shard_sum = ShardSum()
        self._places: dict[Tensor, int] = {}  # parameter of a MARS group -> its place among the norms
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, gamma=gamma, clip=clip,
                                      rule=rule))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with state for each of its parameters. Collective for sharded parameters, as the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["rule"] not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {group['rule']!r}")
        check_hyperparameters(**{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "gamma", "clip")})
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"params must be real floating-point tensors, got one of {parameter.dtype}")
            local = _local(parameter)
            if not torch.empty_like(local).stride() == local.stride():
                raise ValueError(f"params must be dense in memory, got one of strides {local.stride()}")
            self.state[parameter] = self._new_state(parameter, group["rule"])
        if group["rule"] == "mars-adamw":
            for parameter in group["params"]:
                self._places[parameter] = len(self._places)
                self._shard_sum.add(parameter)

    @staticmethod
    def _new_state(parameter: Tensor, rule: str) -> dict[str, Tensor]:
        buffers = ["exp_avg", "exp_avg_sq"] + (["last_grad"] if rule == "mars-adamw" else [])
        # The count lives beside the parameter: the kernels read it there, and the host never needs it.
        step = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
        return {"step": step} | {name: torch.zeros_like(parameter).detach() for name in buffers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises `ValueError` where its groups do not fit these."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(device=_local(parameter).device, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients stay as they are. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [_Update(group, self.state) for group in self.param_groups]
        mars = [update for update in updates if update.group["rule"] == "mars-adamw" and update.parameters]

        for update in mars:  # last_grads hold c from here on
            beta1, _ = update.group["betas"]
            steps = [state["step"] for state in update.states]
            correct_(update.last_grads, update.grads, steps, update.group["gamma"] * beta1 / (1 - beta1))
        squared = self._whole_squared_norms([update for update in mars if update.group["clip"] is not None])

        for update in updates:
            gradients, divisors = update.grads, None
            if update in mars:
                gradients = update.last_grads
                if update.group["clip"] is not None:
                    norms = torch.stack([squared[self._places[owner]] for owner in update.owners])
                    divisors = clip_divisors(norms, update.group["clip"])
            adamw_(update.parameters, gradients, update.states, divisors,
                   **{key: update.group[key] for key in ("lr", "betas", "eps", "weight_decay")})

        for update in mars:  # a copy: the next backward may write into the gradient's memory
            torch._foreach_copy_(update.last_grads, update.grads)
        return loss

    def _whole_squared_norms(self, updates: list["_Update"]) -> list[Tensor]:
        """The squared norm of each corrected gradient, at its parameter's place; 0 for parameters not in `updates`.

        Every rank reduces all places, also those whose parameters have no gradient on this one.
        """
        partial: list[Tensor | None] = [None] * len(self._places)
        for update in updates:
            for owner, norm in zip(update.owners, squared_norms(update.last_grads).unbind()):
                partial[self._places[owner]] = norm
        if not self._shard_sum.groups:
            return partial
        zero = torch.zeros((), dtype=torch.float32, device=_local(next(iter(self._places))).device)
        return self._shard_sum.sum([zero if norm is None else norm for norm in partial])


class _Update:
    """The parameters of a group that have a gradient, and their gradients and state as local tensors."""

    def __init__(self, group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
        self.group = group
        self.owners = [parameter for parameter in group["params"] if parameter.grad is not None]
        self.parameters = [_local(parameter) for parameter in self.owners]
        self.grads = [_local_gradient(parameter) for parameter in self.owners]
        self.states = [{key: _local(value) for key, value in state[parameter].items()} for parameter in self.owners]
        self.last_grads = [local["last_grad"] for local in self.states if "last_grad" in local]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out in memory like its part of the parameter, as the kernels need it."""
    gradient = parameter.grad
    if gradient.is_sparse:
        raise ValueError("params must have dense gradients, got a sparse one")
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local, like = _local(gradient), _local(parameter)
    return local if local.stride() == like.stride() else torch.empty_like(like).copy_(local)
