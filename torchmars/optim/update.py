"""One group's share of a step: its tensors on this rank, and the factors that multiply them."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchmars.optim.elementwise import corrected_squared_norms, lean_coefficients
from torchmars.optim.owners import MatrixShape
from torchmars.optim.rules import RULES

Slices = tuple[slice, slice, slice]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without gradient tracking."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of its memory, as one dimension that shares it.

    No view of the tensor: torch.compile would make kernels for every shape that a view comes from.
    """
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


@dataclass
class Summary:
    """What a group's update leaves for telemetry: small tensors, so that gradients can be freed."""

    products: Tensor
    scale: Tensor
    clip: Tensor | None
    kappa: Tensor | None


class GroupUpdate:
    """The parameters of one group and dtype that have a gradient, for one step.

    Lists run over `parameters`; the tensors in them are flat and local. `set_factors` completes it once the reduction of the
    step is done. Factors are 0-d tensors in the dtype of the computation: at least float32.
    """

    def __init__(self, group: dict[str, Any], parameters: list[Tensor],
                 state: dict[Tensor, dict[str, Tensor]], exact: bool,
                 uncorrected: Set[Tensor]) -> None:
        self.group, self.exact, self.rule = group, exact, RULES[group["rule"]]
        self.parameters = parameters
        self.uncorrected = [parameter in uncorrected for parameter in parameters]
        self.locals = [flat(local_part(parameter)) for parameter in parameters]
        self.grads = [flat(_local_gradient(parameter)) for parameter in parameters]
        states = [state[parameter] for parameter in parameters]
        self.steps = [each["step"] for each in states]

        def buffers(name: str) -> list[Tensor]:
            return [flat(local_part(each[name])) for each in states if name in each]

        self.momenta = buffers("momentum") or buffers("momentum_buffer") or buffers("exp_avg")
        self.squares, self.last_grads = buffers("exp_avg_sq"), buffers("last_grad")
        self.lean = not self.last_grads and self.rule.kind != "adamw"  # by the state there is, whatever clip says by now
        if self.rule.corrected and self.lean and group["clip"] is not None:
            raise ValueError("clip cannot be switched on after the optimizer was created without it: no last gradient was kept")
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)

    def set_factors(self, scale: Tensor, ok: Tensor, products: list[Tensor]) -> None:
        """Take the global clip factor, the finiteness of the step and the reduced products of each parameter."""
        self.ok, self.scale, self.products = ok, scale.to(self.dtype), torch.stack(products)
        beta1, beta2 = self.group["betas"]
        self.rate1, self.lr = self._scalar(1 - beta1), self._scalar(self.group["lr"])
        self.weight_decay = self._scalar(self.group["weight_decay"])
        self.clip = self.kappa = None
        counts = torch.stack(self.steps).double()
        first_step = (counts == 0).double()
        if self.last_grads:
            kappa = (1 - first_step) * (self.group["gamma"] * beta1 / (1 - beta1))
            if any(self.uncorrected):
                kappa = kappa * ~torch.tensor(self.uncorrected, device=kappa.device)
            clip = torch.ones_like(kappa)
            if self.group["clip"] is not None:
                norms = corrected_squared_norms(self.products, scale, kappa).sqrt()
                clip = (self.group["clip"] / norms).clamp(max=1.0)
            self.kappa, self.clip = kappa.to(self.dtype), clip.to(self.dtype)
        if self.rule.kind == "adamw" and self.rule.corrected:
            self.rate2, self.eps = self._scalar(1 - beta2), self._scalar(self.group["eps"])
            self.unbias = [(1 / (1 - beta ** (counts + 1))).to(self.dtype).unbind() for beta in (beta1, beta2)]
        if self.lean:
            gamma_next = self.group["gamma"] if self.group["gamma_next"] is None else self.group["gamma_next"]
            lean = lean_coefficients(self.group["rule"], self.group["betas"], self.group["gamma"],
                                     gamma_next)
            self.decay, self.mix = self._scalar(lean.decay), self._scalar(lean.mix)
            self.weights, self.outs = ((value + lean.first * first_step).to(self.dtype).unbind()
                                       for value in (lean.weight, lean.out))

    def summary(self) -> Summary:
        return Summary(self.products, self.scale, self.clip, self.kappa)

    def correction_factors(self) -> list[dict[str, Any]]:
        """For each parameter, what the passes over a corrected gradient need."""
        shared = self._shared() | {"rate1": self.rate1, "keep": not self.exact}
        return [shared | {"clip": clip, "kappa": kappa} for clip, kappa in zip(self.clip.unbind(), self.kappa.unbind())]

    def adamw_factors(self) -> list[dict[str, Any]]:
        """The same for MARS-AdamW."""
        return [each | {"rate2": self.rate2, "eps": self.eps, "unbias1": unbias1, "unbias2": unbias2}
                for each, unbias1, unbias2 in zip(self.correction_factors(), *self.unbias)]

    def lean_factors(self) -> list[dict[str, Any]]:
        """For each parameter, what the passes over a lean momentum need."""
        shared = self._shared() | {"decay": self.decay, "mix": self.mix}
        return [shared | {"out": out, "weight": weight}
                for out, weight in zip(self.outs, self.weights)]

    def _shared(self) -> dict[str, Any]:
        return {"scale": self.scale, "ok": self.ok, "lr": self.lr, "weight_decay": self.weight_decay}

    def matrix_input(self, number: int, shape: MatrixShape, place: Slices) -> Tensor:
        """The part `place` of what is to be orthogonalised, within the local [batch, rows, cols].

        A lean momentum must not have been updated yet, another must.
        """
        momentum = self._matrix(self.momenta[number], number, shape)[place]
        if not self.lean:
            return momentum
        gradient = self._matrix(self.grads[number], number, shape)[place]
        used = self.scale * torch.where(self.ok, gradient, 0).to(self.dtype)
        return self.mix * momentum.to(self.dtype) + self.outs[number] * used

    def apply_matrix(self, number: int, shape: MatrixShape, place: Slices, direction: Tensor, scale: float) -> None:
        """x <- x - lr (scale direction + weight_decay x) for the part `place` of the parameter, if the step counts."""
        lr = self.lr * self.ok
        x = self._matrix(self.locals[number], number, shape)[place]
        wide = x.to(self.dtype)  # x itself, but for a bfloat16 parameter, which is rounded once
        x.copy_(wide.mul_(1 - lr * self.weight_decay).addcmul_(direction.to(self.dtype), lr * scale, value=-1))

    def _matrix(self, values: Tensor, number: int, shape: MatrixShape) -> Tensor:
        return values.view(shape.local(local_part(self.parameters[number]).shape))

    def _scalar(self, value: float | Tensor) -> Tensor:
        # On the CPU, also for parameters on a GPU: kernels take it as an argument, so nothing is copied or waited for.
        return torch.as_tensor(value, dtype=self.dtype)


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out in memory like its part of the parameter, as the kernels need it."""
    gradient = parameter.grad
    if gradient.is_sparse:
        raise ValueError("params must have dense gradients, got a sparse one")
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local, like = local_part(gradient), local_part(parameter)
    return local if local.stride() == like.stride() else torch.empty_like(like).copy_(local)
