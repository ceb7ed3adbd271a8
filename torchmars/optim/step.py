"""The tensors of one step, group by group, and the factors from its reduced sums."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchmars.optim.kernels import KeepFactors, Tensors, keep_gradient_, run_kernel
from torchmars.optim.matrices.shapes import is_stack
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.settings import Settings
from torchmars.optim.tensors import flat_parts, local_gradient

State = dict[str, Tensor]  # of a parameter: "step" and the rule's buffers


class GroupTensors:
    """The parameters of one group and dtype that have a gradient, for one step.

    Lists run over `parameters`. The tensors in them are local and flat. `dtype` is that of the
    computation: at least float32. `stacks` says whether they are stacks of matrices, all of them.
    `kappa` is the strength of the correction, which a first step does not have.
    """

    def __init__(
        self,
        settings: Settings,
        parameters: list[Tensor],
        states: list[State],
        kappa: float,
    ) -> None:
        self.settings, self.parameters, self.states = settings, parameters, states
        self.kappa = kappa
        self.names = [name for name in states[0] if name != "step"]
        self.stacks = is_stack(parameters[0].shape, settings["flatten"])
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.corrects = "last_grad" in self.names

    @property
    def rule(self) -> str:
        """The name of the group's rule."""
        name: str = self.settings["rule"]
        return name

    @property
    def role(self) -> str:
        """The role of the group, or its rule where it has none."""
        return self.settings.get("role", self.rule)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The parameters."""
        return flat_parts(self.parameters)

    @cached_property
    def grads(self) -> list[Tensor]:
        """Their gradients."""
        return flat_parts(map(local_gradient, self.parameters))

    @cached_property
    def steps(self) -> list[Tensor]:
        """The steps that each was updated in, 0-d."""
        return [state["step"] for state in self.states]

    @cached_property
    def buffers(self) -> dict[str, list[Tensor]]:
        """The state, by name."""
        return {name: flat_parts(state[name] for state in self.states) for name in self.names}

    @property
    def momenta(self) -> list[Tensor]:
        """The first of the buffers."""
        return self.buffers[self.names[0]]

    @property
    def last_grads(self) -> list[Tensor]:
        """The last gradients; empty if none are kept."""
        return self.buffers.get("last_grad", [])

    def scalar(self, value: float | Tensor) -> Tensor:
        """Return `value` as a 0-d tensor in the dtype of the computation.

        It is on the CPU, also for parameters on a GPU: kernels take it as an argument, so nothing
        is copied or waited for.
        """
        return torch.as_tensor(value, dtype=self.dtype)

    def count_step(self, applied: Tensor) -> None:
        """Count one more step of each tensor, where it is `applied`."""
        torch._foreach_add_(self.steps, [applied.float()] * len(self.steps))


@dataclass(frozen=True)
class StepFactors:
    """The factors of one group from a step's reduced sums, in its computation's dtype."""

    applied: Tensor
    """Whether the step is applied: the condition of each write. Where it is false nothing changes.
    0-d, bool."""
    scale: Tensor
    """The factor of the global clip, 0-d."""
    globally_clipped: bool
    """Whether there is a global clip."""
    products: Tensor
    """<g, g>, <g, h> and <h, h> of each whole tensor, [n, 3] in float64."""
    steps_made: Tensor
    """The steps that each tensor has made, [n] in float64."""
    corrections: Corrections | None
    """None if no last gradient is kept."""
    keep_apart: bool
    """Whether a kernel of its own makes the gradient just used the last one: `keep_gradients`."""
    compile: bool
    """Whether large tensors go through compiled kernels."""

    def run(self, kernel: Callable, tensors: Tensors, factors: tuple) -> None:
        """Run a rule's kernel on all tensors with their factors."""
        run_kernel(kernel, tensors, factors, self.compile)

    def keep_gradients(self, group: GroupTensors) -> None:
        """Make the gradients just used the last gradients, where the rule's kernel has not."""
        if self.keep_apart:
            pairs = list(zip(group.grads, group.last_grads))
            self.run(keep_gradient_, pairs, KeepFactors(self.scale, self.applied))
