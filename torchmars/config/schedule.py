"""The learning rate as a function of the step."""

from dataclasses import dataclass, replace
from typing import Literal

from torchmars.config.fields import Amount, Count, require


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of the step."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The schedule after the warmup. cosine, linear: decay over the rest of the run. constant. wsd:
    constant, then a linear decay over the last decay_steps."""
    warmup_steps: Count = 0
    """Steps of linear warmup from 0."""
    decay_steps: Count | None = None
    """wsd: steps of the final decay. Default: a fifth of the run."""
    power: Amount = 1.0
    """linear, wsd: the decay is 1 - t^power, t from 0 to 1: a line, or with 0.5 1 - sqrt."""
    min_lr: Amount = 0.0
    """Learning rate at the end of the decay, an absolute value."""

    def check(self) -> None:
        """Raise `UserError` for settings that do not go together."""
        given = {"decay_steps": self.decay_steps is not None and self.name != "wsd"}
        given["power"] = self.power != 1 and self.name not in ("linear", "wsd")
        for key, wrong in given.items():
            why = f'schedule.{key} has no meaning for schedule.name = "{self.name}": remove it'
            require(not wrong, why)

    def resolve(self, steps: int) -> "ScheduleConfig":
        """Return the section for a run of `steps` steps; decay_steps is None except for wsd."""
        if self.name == "wsd" and self.decay_steps is None:
            return replace(self, decay_steps=steps // 5)
        return self

    def warning(self, steps: int) -> str:
        """Return in a line that its lengths, resolved, do not fit training.steps; else nothing."""
        warmup, decay = self.warmup_steps, self.decay_steps or 0
        run = f"training.steps = {steps:,}"
        if warmup >= steps and not (warmup == steps and self.name == "constant"):
            longer = warmup > steps
            reached = f"reaches {steps / warmup:.0%} of" if longer else "ends at"
            return (
                f"schedule.warmup_steps = {warmup:,} is {'longer than' if longer else 'as long as'}"
                f" {run}: the learning rate {reached} optimizer.lr: lower schedule.warmup_steps"
            )
        if decay and warmup + decay > steps:
            return (
                f"schedule.warmup_steps = {warmup:,} and schedule.decay_steps = {decay:,} are "
                f"longer than {run} together: the decay has {steps - warmup:,} steps: lower one"
            )
        return ""
