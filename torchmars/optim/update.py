"""One group's share of a step: its tensors on this rank, and the factors that multiply them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchmars.optim.elementwise import (
    adamw_,
    corrected_squared_norms,
    lean_coefficients,
    lean_lion_,
    lean_momentum_,
    lion_,
    momentum_,
    run_pass,
)
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
    return tensor.new_empty(0).set_(
        tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,)
    )


@dataclass
class Summary:
    """What a group's update leaves for telemetry: small tensors, so that gradients can be freed."""

    parameters: list[Tensor]
    products: Tensor
    scale: Tensor
    clip: Tensor | None
    kappa: Tensor | None
    rate1: float

    def sums(self, state: dict[Tensor, dict[str, Tensor]]) -> Tensor:
        """What telemetry adds up over tensors, [9] in float64.

        <g, g>, s^2 <g, g> and `squared_memory`; and of tensors with a last gradient s^2 <g, g>, s
        <g, h>, <h, h>, ||c - s g||^2, how many are clipped, and how many there are. s is the factor
        of the global clip, c the corrected gradient.
        """
        scale, gg = self.scale.double(), self.products[:, 0]
        memory = sum(
            squared_memory(parameter, state[parameter], self.rate1) for parameter in self.parameters
        )
        sums = [gg.sum(), scale**2 * gg.sum(), memory]
        if self.clip is None:
            return F.pad(torch.stack(sums), (0, 6))
        _, gh, hh = self.products.unbind(-1)
        differences = (scale**2 * gg - 2 * scale * gh + hh).clamp(min=0.0)
        sums += [scale**2 * gg.sum(), scale * gh.sum(), hh.sum()]
        sums += [(self.kappa.double() ** 2 * differences).sum(), (self.clip < 1).double().sum()]
        return torch.stack([*sums, torch.full_like(memory, len(self.clip))])


def squared_memory(parameter: Tensor, state: dict[str, Tensor], rate1: float) -> Tensor:
    """The squared size of what earlier gradients left in a parameter's state.

    That is ||m||^2, or the sum of the second moment where there is one; from this rank's part, as
    if the parts of other ranks were alike. Muon's buffer is a sum of gradients: `rate1`, one minus
    its decay, makes it their average.
    """
    if "exp_avg_sq" in state:
        part = local_part(state["exp_avg_sq"])
        squared = part.sum(dtype=torch.float64)
    else:
        name, scale = next(
            (name, scale)
            for name, scale in (("momentum_buffer", rate1), ("momentum", 1.0), ("exp_avg", 1.0))
            if name in state
        )
        part = local_part(state[name])
        squared = (scale * torch.linalg.vector_norm(part, dtype=torch.float64)).square()
    return squared * (parameter.numel() / max(part.numel(), 1))


def role_telemetry(sums: list[float]) -> dict[str, float]:
    """What `MARS.telemetry` tells of a role, from its `Summary.sums`."""
    gg, used, memory, kept, gh, hh, correction, clipped, tensors = sums
    told = {"grad_norm": math.sqrt(gg), "momentum": math.sqrt(memory / used) if used > 0 else 0.0}
    if tensors:
        told["clipped"] = clipped / tensors
        # The first step has no last gradient, and tells 0.
        told["correction"] = math.sqrt(correction / kept) if kept > 0 else 0.0
        told["cosine"] = gh / math.sqrt(kept * hh) if kept * hh > 0 else 0.0
    return told


class GroupUpdate:
    """The parameters of one group and dtype that have a gradient, for one step.

    Lists run over `parameters`; the tensors in them are flat and local. `set_factors` completes it once the reduction of the
    step is done. Factors are 0-d tensors in the dtype of the computation: at least float32.
    """

    def __init__(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        state: dict[Tensor, dict[str, Tensor]],
        exact: bool,
        wire: torch.dtype,
    ) -> None:
        self.group, self.exact, self.rule = group, exact, RULES[group["rule"]]
        self.parameters = parameters
        self.locals = [flat(local_part(parameter)) for parameter in parameters]
        self.grads = [flat(_local_gradient(parameter)) for parameter in parameters]
        states = [state[parameter] for parameter in parameters]
        self.steps = [each["step"] for each in states]

        def buffers(name: str) -> list[Tensor]:
            return [flat(local_part(each[name])) for each in states if name in each]

        self.momenta = buffers("momentum") or buffers("momentum_buffer") or buffers("exp_avg")
        self.squares, self.last_grads = buffers("exp_avg_sq"), buffers("last_grad")
        self.lean = (
            not self.last_grads and self.rule.kind != "adamw"
        )  # by the state there is, whatever clip says by now
        if self.rule.corrected and self.lean and group["clip"] is not None:
            raise ValueError(
                "clip cannot be switched on after the optimizer was created without it: no last gradient was kept"
            )
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.largest_norm = self._largest_norm(wire)

    def _largest_norm(self, wire: torch.dtype) -> float:
        """The largest norm of a tensor's gradient, after the global clip, without overflow.

        No entry is larger than the norm. While h is no larger than g may be, a correction and all
        that leads to it stay below 2 (1 + kappa) ||g||.
        """
        # Muon's buffer is a sum of gradients, as large as 1 / (1 - b1) of them.
        is_sum = self.rule.kind == "matrix" and not self.rule.corrected
        sums = 1 / (1 - self.group["betas"][0]) if is_sum else 1.0
        limits = [torch.finfo(self.momenta[0].dtype).max / 2 / sums]
        limits += [math.sqrt(torch.finfo(square.dtype).max / 2) for square in self.squares[:1]]
        if self.rule.kind == "matrix":  # travels as it is, and is divided by its norm
            wide = torch.promote_types(wire, torch.float32)
            limits += [torch.finfo(wire).max / 2, math.sqrt(torch.finfo(wide).max / 2)]
        most = min(limits)
        if self.last_grads and self.group["clip"] is not None and self.group["clip"] <= most:
            most = torch.finfo(self.dtype).max / 2  # the clip comes before any of these
        most /= 2 * (1 + self._strength())
        return min([most, *(torch.finfo(last_grad.dtype).max for last_grad in self.last_grads[:1])])

    def _strength(self) -> float:
        """kappa, but in a first step, where there is no correction."""
        beta1 = self.group["betas"][0]
        return self.group["gamma"] * beta1 / (1 - beta1) if self.rule.corrected else 0.0

    def strain(self, products: list[Tensor]) -> Tensor:
        """The largest norm of the gradients, before the global clip, over `largest_norm`."""
        return torch.stack(products)[:, 0].sqrt().max() / self.largest_norm

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
            gg, _, hh = self.products.unbind(-1)
            # Not finite, or too large: then h is s g, as in a first step.
            self.unusable = ~(hh.sqrt() <= self.largest_norm)
            without = torch.stack([gg, scale * gg, scale**2 * gg], -1)
            self.products = torch.where(self.unusable[:, None], without, self.products)
            kappa = torch.where(self.unusable, 0.0, (1 - first_step) * self._strength())
            clip = torch.ones_like(kappa)
            if self.group["clip"] is not None:
                norms = corrected_squared_norms(self.products, scale, kappa).sqrt()
                clip = (self.group["clip"] / norms).clamp(max=1.0)
            self.kappa, self.clip = kappa.to(self.dtype), clip.to(self.dtype)
        if self.rule.kind == "adamw" and self.rule.corrected:
            self.rate2, self.eps = self._scalar(1 - beta2), self._scalar(self.group["eps"])
            self.unbias = [
                (1 / (1 - beta ** (counts + 1))).to(self.dtype).unbind() for beta in (beta1, beta2)
            ]
        if self.lean:
            gamma_next = (
                self.group["gamma"]
                if self.group["gamma_next"] is None
                else self.group["gamma_next"]
            )
            lean = lean_coefficients(
                self.group["rule"], self.group["betas"], self.group["gamma"], gamma_next
            )
            self.decay, self.mix = self._scalar(lean.decay), self._scalar(lean.mix)
            self.weights, self.outs = (
                (value + lean.first * first_step).to(self.dtype).unbind()
                for value in (lean.weight, lean.out)
            )

    def summary(self) -> Summary:
        return Summary(
            self.parameters,
            self.products,
            self.scale,
            self.clip,
            self.kappa,
            1 - self.group["betas"][0],
        )

    def correction_factors(self) -> list[dict[str, Any]]:
        """For each parameter, what the passes over a corrected gradient need."""
        shared = self._shared() | {"rate1": self.rate1, "keep": not self.exact}
        each = zip(self.clip.unbind(), self.kappa.unbind(), self.unusable.unbind())
        return [
            shared | {"clip": clip, "kappa": kappa, "unusable": unusable}
            for clip, kappa, unusable in each
        ]

    def adamw_factors(self) -> list[dict[str, Any]]:
        """The same for MARS-AdamW."""
        return [
            each | {"rate2": self.rate2, "eps": self.eps, "unbias1": unbias1, "unbias2": unbias2}
            for each, unbias1, unbias2 in zip(self.correction_factors(), *self.unbias)
        ]

    def lean_factors(self) -> list[dict[str, Any]]:
        """For each parameter, what the passes over a lean momentum need."""
        shared = self._shared() | {"decay": self.decay, "mix": self.mix}
        return [
            shared | {"out": out, "weight": weight} for out, weight in zip(self.outs, self.weights)
        ]

    def _shared(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "ok": self.ok,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
        }

    def update_momentum(self, compile: bool) -> None:
        """The second pass of matrix rules: the momentum."""
        if self.lean:
            tensors = list(zip(self.momenta, self.grads))
            run_pass(lean_momentum_, tensors, self.lean_factors(), compile)
        else:
            tensors = list(zip(self.momenta, self.grads, self.last_grads))
            run_pass(momentum_, tensors, self.correction_factors(), compile)

    def update_elementwise(self, compile: bool, clipped: bool) -> None:
        """The second pass of the rules that work element by element.

        `clipped`: whether there is a global clip.
        """
        if self.rule.kind == "sign" and self.lean:
            tensors = list(zip(self.locals, self.momenta, self.grads))
            run_pass(lean_lion_, tensors, self.lean_factors(), compile)
        elif self.rule.kind == "sign":
            tensors = list(zip(self.locals, self.grads, self.last_grads, self.momenta))
            run_pass(lion_, tensors, self.correction_factors(), compile)
        elif self.rule.corrected:
            tensors = list(
                zip(self.locals, self.grads, self.last_grads, self.momenta, self.squares)
            )
            run_pass(adamw_, tensors, self.adamw_factors(), compile)
        else:
            # torch's own fused kernel takes many tensors at once. It raises the step counts itself.
            adamw(
                self.locals,
                self.grads,
                self.momenta,
                self.squares,
                [],
                self.steps,
                fused=True,
                grad_scale=(1 / self.scale).float() if clipped else None,
                found_inf=(~self.ok).float(),
                amsgrad=False,
                maximize=False,
                beta1=self.group["betas"][0],
                beta2=self.group["betas"][1],
                **{key: self.group[key] for key in ("lr", "eps", "weight_decay")},
            )

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

    def apply_matrix(
        self, number: int, shape: MatrixShape, place: Slices, direction: Tensor, scale: float
    ) -> None:
        """x <- x - lr (scale direction + weight_decay x) for the part `place` of the parameter, if the step counts."""
        lr = self.lr * self.ok
        x = self._matrix(self.locals[number], number, shape)[place]
        wide = x.to(self.dtype)  # x itself, but for a bfloat16 parameter, which is rounded once
        x.copy_(
            wide.mul_(1 - lr * self.weight_decay).addcmul_(
                direction.to(self.dtype), lr * scale, value=-1
            )
        )

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
