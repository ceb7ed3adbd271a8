"""Every setting of a run: one file and one dataclass for each section of the TOML file."""

from torchmars.config.activations import ActivationCheckpointConfig
from torchmars.config.checkpoint import CheckpointConfig
from torchmars.config.config import Config, ResolvedConfig, identity_fields, reported_sections
from torchmars.config.data import DataConfig, PartConfig, ResolvedData
from torchmars.config.evaluation import EvaluationConfig
from torchmars.config.guards import GuardsConfig
from torchmars.config.metrics import MetricsConfig
from torchmars.config.model import ModelConfig
from torchmars.config.optimizer import (
    GroupConfig,
    OptimizerConfig,
    PatternConfig,
    ResolvedOptimizer,
    Rule,
)
from torchmars.config.parallelism import Degrees, ParallelismConfig
from torchmars.config.profiler import ProfilerConfig
from torchmars.config.run import RunConfig
from torchmars.config.schedule import ScheduleConfig
from torchmars.config.training import TrainingConfig
from torchmars.config.transfer import TransferConfig
from torchmars.config.validation import ValidationConfig

__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Degrees",
    "EvaluationConfig",
    "GroupConfig",
    "GuardsConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PartConfig",
    "PatternConfig",
    "ProfilerConfig",
    "ResolvedConfig",
    "ResolvedData",
    "ResolvedOptimizer",
    "Rule",
    "RunConfig",
    "ScheduleConfig",
    "TrainingConfig",
    "TransferConfig",
    "ValidationConfig",
    "identity_fields",
    "reported_sections",
]
