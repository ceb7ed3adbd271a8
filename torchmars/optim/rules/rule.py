"""The interface of an update rule.

The files of this folder import no torch, so that the config can read rules' declarations. Their
arithmetic uses the methods of the tensors that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchmars.optim.settings import Declared, Settings

if TYPE_CHECKING:
    from torchmars.optim.rules.lean import LeanForm
    from torchmars.optim.step import GroupTensors, StepFactors


class Rule(ABC):
    """An update rule: its name, its settings and its buffers.

    To add one, derive from `ElementwiseRule` or `MatrixRule` in a file of its own, and name it in
    `rules.RULES`. Rules have no state of their own.
    """

    name: ClassVar[str]
    settings: ClassVar[Declared]
    """Each setting, with its default: published where there is a published one, for GPT-2 small."""
    variance_reduced: ClassVar[bool] = False
    """Whether it uses the corrected gradient of MARS. It then has the settings gamma and clip."""
    continues: ClassVar[Sequence[str]] = ()
    """Other rules whose saved state this one can continue from."""
    counts_steps: ClassVar[bool] = False
    """Whether `update` increments the step counts itself."""

    @abstractmethod
    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        """Return the names of the state tensors that are as large as the parameter.

        The first is the momentum. "exp_avg", "exp_avg_sq" (the second moment) and "last_grad" mean
        the same under every rule that has them. "momentum" means something else under each, and is
        only read by the rule that wrote it.
        """

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        """Return the group settings of those roles whose settings are not `main`.

        `settings` are those of the optimizer, as `groups.complete_settings` returns them.
        """
        return {"vector": main | {"weight_decay": 0.0}}

    @abstractmethod
    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        """Return what the lr of a matrix with `sides` [out, in] is of the lr that suits `base`.

        A step changes outputs alike at both if its largest singular value goes with the root of
        out / in (Yang et al., arXiv 2310.17813).
        """

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each setting, by name."""
        return {setting.name: setting.default for setting in self.settings}


class ElementwiseRule(Rule):
    """A rule that updates each element of a tensor on its own."""

    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        # All elements move by about lr: a matrix of few directions, of norm lr (out in)^(1/2).
        return base[1] / sides[1]

    @abstractmethod
    def update(self, group: GroupTensors, step: StepFactors) -> None:
        """Update the weights and the state of `group` in place, where `step.applied`."""


class MatrixRule(Rule):
    """A rule that steps along an orthogonalised momentum: x <- x - lr (scale O(m) + decay x)."""

    def lr_factor(self, sides: tuple[int, int], base: tuple[int, int]) -> float:
        (rows, cols), (base_rows, base_cols) = sides, base
        grows = (rows / base_rows) / (cols / base_cols)
        return grows**0.5 * self.scale(*base) / self.scale(*sides)

    @abstractmethod
    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of an orthogonalised [rows, cols] matrix."""

    @abstractmethod
    def lean_form(self, settings: Settings) -> LeanForm:
        """Return the coefficients of the momentum where no last gradient is kept."""
