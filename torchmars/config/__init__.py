"""Every setting of a run: a dataclass for each section of the TOML file."""

from torchmars.config.data import DataConfig, PartConfig, ResolvedData
from torchmars.config.model import ModelConfig, TransferConfig, model_config
from torchmars.config.optimizer import GroupConfig, OptimizerConfig, PatternConfig, Rule
from torchmars.config.parallelism import Degrees, ParallelismConfig
from torchmars.config.sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    GuardsConfig,
    MetricsConfig,
    ProfilerConfig,
    ResolvedConfig,
    RunConfig,
    ScheduleConfig,
    ValidationConfig,
    identity_fields,
    reported_sections,
)
from torchmars.config.training import TrainingConfig

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
    "Rule",
    "RunConfig",
    "ScheduleConfig",
    "TrainingConfig",
    "TransferConfig",
    "ValidationConfig",
    "identity_fields",
    "model_config",
    "reported_sections",
]
