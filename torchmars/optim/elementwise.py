"""The passes of a MARS step that work element by element, on lists of local tensors.

Nothing here waits for the device: what depends on a value (a first step, a clip factor) stays a tensor.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def correct_(last_grads: list[Tensor], grads: list[Tensor], steps: list[Tensor], kappa: float) -> None:
    """Turn each last gradient h into c = g + kappa (g - h), in place; c = g where its step count is still 0.

    `steps` are 0-d counts of the updates made so far. Source: MARS (arXiv 2411.10438), equation 4.2 in approximate
    form, with h_1 = g_1.
    """
    started = torch.stack(steps) > 0
    for h, g, weight in zip(last_grads, grads, torch.where(started, 1.0 + kappa, 1.0).unbind()):
        h.lerp_(g, weight.to(h.dtype))  # h + w (g - h), which torch evaluates as g + kappa (g - h)


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """The squared 2-norm of each tensor, as one tensor [n]; in float32, or in float64 for float64 tensors."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.stack(norms).square()


def clip_divisors(squared: Tensor, clip: float) -> Tensor:
    """max(1, norm / clip) for whole-tensor squared norms [n]: dividing by it clips each tensor to norm `clip`."""
    return (squared.sqrt() / clip).clamp(min=1.0)


def adamw_(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], divisors: Tensor | None, *,
           lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """One AdamW step in place by torch's fused kernel, on the gradients divided by `divisors` [n] (if any).

    The kernel divides while it reads and writes the divided gradient back into `grads`. `states` hold "step",
    "exp_avg" and "exp_avg_sq"; the step count rises by one.
    """
    def kernel(params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], scale: Tensor | None) -> None:
        adamw(params, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
              [s["step"] for s in states], fused=True, grad_scale=scale, amsgrad=False, maximize=False,
              lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps)

    if divisors is None:
        kernel(params, grads, states, None)
    else:
        # The kernel takes one scale per call, and every tensor has a clip factor of its own.
        for param, grad, state, divisor in zip(params, grads, states, divisors.float().unbind()):
            kernel([param], [grad], [state], divisor)
