"""The reports of a run, and where they go."""

from dataclasses import dataclass

from torchmars.config.fields import Positive


@dataclass(frozen=True)
class MetricsConfig:
    """The reports of a run. metrics.jsonl in the run folder is always written."""

    log_interval: Positive = 10
    """Steps between progress lines."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder (pip install 'torchmars[tensorboard]')."""
    wandb: bool = False
    """Also log to Weights & Biases. WANDB_MODE=offline keeps it on this machine."""
    wandb_project: str = "torchmars"
    """W&B project."""
