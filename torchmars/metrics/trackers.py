"""Trackers: TensorBoard and Weights & Biases, each where the config asks for it."""

import os
from dataclasses import asdict
from typing import Protocol

from torchmars.begin import is_missing
from torchmars.config import MetricsConfig, ResolvedConfig
from torchmars.core.errors import UserError, missing_package

WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


class Tracker(Protocol):
    """What every tracker offers."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add the measurements of a step."""

    def close(self) -> None:
        """Write what is kept back, and end."""


class TensorBoard:
    """Writes TensorBoard events to the run folder."""

    def __init__(self, config: ResolvedConfig, step: int) -> None:
        """Open it to continue after `step`: events of later steps are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(config.run.path / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, with all settings of the run."""

    def __init__(self, config: ResolvedConfig) -> None:
        import wandb

        self.run = wandb.init(
            project=config.metrics.wandb_project,
            name=config.run.name,
            group=config.run.name,
            dir=config.run.path,
            config=asdict(config),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def open_trackers(config: ResolvedConfig, step: int) -> list[Tracker]:
    """Open the trackers that `config` asks for, to continue after `step`.

    It takes the whole config, since Weights & Biases shows it. Raises `UserError`.
    """
    check_trackers(config.metrics)
    trackers: list[Tracker] = []
    if config.metrics.tensorboard:
        trackers.append(TensorBoard(config, step))
    if config.metrics.wandb:
        trackers.append(WeightsAndBiases(config))
    return trackers


def check_trackers(config: MetricsConfig) -> None:
    """Raise `UserError` if a tracker that the config asks for cannot be had."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and is_missing(name):
            raise missing_package(name, f"metrics.{name}", extra=name)
    mode = os.environ.get("WANDB_MODE", "online")
    if config.wandb and mode not in WANDB_MODES:
        raise UserError(f"WANDB_MODE must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
