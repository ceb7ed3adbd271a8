"""Applies the schedules of learning rate and gamma to an optimizer."""

from torchmars.config import ResolvedConfig
from torchmars.optim import MARS, between, lr_factor


class Schedule:
    """Sets the learning rate and gamma of every group, in proportion to their first values."""

    def __init__(self, config: ResolvedConfig, optimizer: MARS) -> None:
        self.config, self.optimizer = config, optimizer
        self.began = [(group["lr"], group["gamma"]) for group in optimizer.param_groups]

    def apply(self, step: int) -> float:
        """Set the hyperparameters of step number `step`, from 1; return the peak rate's value."""
        config, total = self.config.schedule, self.config.training.steps
        peak = self.config.optimizer.lr
        factor = lr_factor(
            step,
            total,
            name=config.name,
            floor=config.min_lr / peak,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
        )
        for group, (lr, gamma) in zip(self.optimizer.param_groups, self.began):
            group["lr"] = lr * factor
            if config.final_gamma is not None:
                group["gamma"], group["gamma_next"] = (
                    between(each, total, gamma, config.final_gamma, config.gamma)
                    for each in (step, step + 1)
                )
        return peak * factor
