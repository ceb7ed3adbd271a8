"""The reports of a run, and where they go."""

from dataclasses import dataclass, field
from typing import Annotated

from torchmars.config.fields import Positive
from torchmars.core.bounds import Bounds


@dataclass(frozen=True)
class Tag(Bounds):
    """Bounds of a text that Weights & Biases takes as a tag."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        if not 1 <= len(value) <= 64:
            raise ValueError(f"must be a tag of 1 to 64 characters, got {value!r}")
        return value


Tags = list[Annotated[str, Tag()]]


@dataclass(frozen=True)
class MetricsConfig:
    """The reports of a run. metrics.jsonl in the run folder is always written."""

    log_interval: Positive = 10
    """Steps between progress lines."""
    attention: bool = False
    """Also report the largest logit of each block's attention. It is exact. On CPUs it costs a
    reported step about as much as another forward pass of attention."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder (pip install 'torchmars[tensorboard]')."""
    wandb: bool = False
    """Also log to Weights & Biases. WANDB_MODE=offline keeps it on this machine."""
    wandb_project: str = "torchmars"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B team or user that the project is of. Default: your account's own."""
    wandb_tags: Tags = field(default_factory=list)
    """W&B tags of the run. Its name there is run.name."""
