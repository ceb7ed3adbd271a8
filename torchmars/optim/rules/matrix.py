"""The rules that orthogonalise whole matrices: Muon, and MARS-M and MARS-Shampoo."""

from typing import ClassVar

from torchmars.optim.rules.by_role import adamw_but_for_matrices, mars_settings_by_role
from torchmars.optim.rules.lean import LeanForm, mars_lean_form
from torchmars.optim.rules.rule import MatrixRule
from torchmars.optim.settings import (
    BETAS,
    BETAS_1D,
    CLIP,
    EPS,
    GAMMA,
    GAMMA_NEXT,
    LR,
    LR_1D,
    LR_REST,
    MARS_SETTINGS,
    MATRIX_SETTINGS,
    PER_HEAD,
    WEIGHT_DECAY,
    Declared,
    Settings,
)

# Heads apart lowered the loss under muon and mars-m (docs/optimizers.md#heads-apart-measured).
# Under mars-shampoo they were not tried.
HEADS_APART = tuple(PER_HEAD.of("auto") if each is PER_HEAD else each for each in MATRIX_SETTINGS)
MUON_SETTINGS = (
    LR.of(6e-3),
    BETAS.of((0.95, 0.99)),
    EPS,
    WEIGHT_DECAY.of(0.1),
    BETAS_1D,
    LR_REST,
    *HEADS_APART,
)


def moonlight_scale(rows: int, cols: int) -> float:
    """Return 0.2 max(rows, cols)^(1/2): a step is as large as AdamW's (arXiv 2502.16982)."""
    return 0.2 * max(rows, cols) ** 0.5


class Muon(MatrixRule):
    """Muon with Nesterov momentum in Moonlight's form (Liu et al., arXiv 2502.16982).

    The buffer u is B, with B_t = mu B_{t-1} + g_t, and the direction is that of g_t + mu B_t, here
    times 1 - mu, so that it is of the gradient's size.
    """

    name = "muon"
    settings = MUON_SETTINGS

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return adamw_but_for_matrices(settings)

    def scale(self, rows: int, cols: int) -> float:
        return moonlight_scale(rows, cols)

    def lean_form(self, settings: Settings) -> LeanForm:
        mu, _ = settings["betas"]
        return LeanForm(mix=(1 - mu) * mu**2, out=(1 - mu) * (1 + mu), decay=mu, weight=1.0)


class MarsM(MatrixRule):
    """Muon on the corrected momentum: MARS-M (Liu et al., arXiv 2510.21800)."""

    name = "mars-m"
    settings: ClassVar[Declared] = (*MUON_SETTINGS, GAMMA, GAMMA_NEXT, CLIP)
    variance_reduced = True

    def buffers(self, clip: float | None, exact: bool) -> tuple[str, ...]:
        return ("momentum",) if clip is None and not exact else ("exp_avg", "last_grad")

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        return adamw_but_for_matrices(settings)

    def scale(self, rows: int, cols: int) -> float:
        return moonlight_scale(rows, cols)

    def lean_form(self, settings: Settings) -> LeanForm:
        return mars_lean_form(settings)


class MarsShampoo(MarsM):
    """MARS-Shampoo (arXiv 2411.10438), with the scale of the published code."""

    name = "mars-shampoo"
    settings = (
        LR.of(2e-2),
        BETAS.of((0.95, 0.99)),
        WEIGHT_DECAY.of(0.01),
        LR_1D.of(3e-3),
        *MARS_SETTINGS,
        *MATRIX_SETTINGS,
    )
    # Of the matrices' lr: an orthogonal matrix moves its entries less than AdamW does.
    EMBEDDING_LR = 0.3

    def settings_by_role(self, main: Settings, settings: Settings) -> dict[str, Settings]:
        outer = main | {"rule": "mars-adamw", "lr": settings["lr"] * self.EMBEDDING_LR}
        return mars_settings_by_role(outer, settings)

    def scale(self, rows: int, cols: int) -> float:
        return max(1.0, rows / cols) ** 0.5
