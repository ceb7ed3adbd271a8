"""Every setting of a run: a dataclass for each section of the TOML file."""

from torchmars.config.data import DataConfig as DataConfig
from torchmars.config.data import PartConfig as PartConfig
from torchmars.config.data import ResolvedData as ResolvedData
from torchmars.config.model import ModelConfig as ModelConfig
from torchmars.config.model import TransferConfig as TransferConfig
from torchmars.config.model import model_config as model_config
from torchmars.config.optimizer import GroupConfig as GroupConfig
from torchmars.config.parallelism import Degrees as Degrees
from torchmars.config.parallelism import ParallelismConfig as ParallelismConfig
from torchmars.config.sections import ActivationCheckpointConfig as ActivationCheckpointConfig
from torchmars.config.sections import CheckpointConfig as CheckpointConfig
from torchmars.config.sections import Config as Config
from torchmars.config.sections import GuardsConfig as GuardsConfig
from torchmars.config.sections import MetricsConfig as MetricsConfig
from torchmars.config.sections import ProfilerConfig as ProfilerConfig
from torchmars.config.sections import ResolvedConfig as ResolvedConfig
from torchmars.config.sections import RunConfig as RunConfig
from torchmars.config.sections import ValidationConfig as ValidationConfig
from torchmars.config.sections import identity_fields as identity_fields
from torchmars.config.sections import reported_sections as reported_sections
from torchmars.config.training import TrainingConfig as TrainingConfig
