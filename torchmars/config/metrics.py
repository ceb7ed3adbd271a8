"""The reports of a run, and where they go."""

from dataclasses import dataclass

from torchmars.config.fields import Positive


@dataclass(frozen=True)
class MetricsConfig:
    """The reports of a run. metrics.jsonl in the run folder is always written."""

    log_interval: Positive = 10
    """Steps between progress lines."""
    attention: bool = False
    """Also report the largest logit of each block's attention. It is exact. On CPUs it costs a
    reported step about as much as another forward pass of attention."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder (by the extra tensorboard)."""
    wandb: bool = False
    """Also log to Weights & Biases. WANDB_MODE=offline keeps it on this machine."""
    wandb_project: str = "torchmars"
    """W&B project. WANDB_ENTITY names its team, WANDB_TAGS the run's tags."""
