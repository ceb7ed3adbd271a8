"""All settings of one run: as files give them, and resolved."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any

from torchmars.config.activations import ActivationCheckpointConfig
from torchmars.config.checkpoint import CheckpointConfig
from torchmars.config.data import DataConfig, ResolvedData
from torchmars.config.evaluation import EvaluationConfig
from torchmars.config.fields import Mark, require
from torchmars.config.guards import GuardsConfig
from torchmars.config.metrics import MetricsConfig
from torchmars.config.model import ModelConfig, model_section
from torchmars.config.optimizer import OptimizerConfig, ResolvedOptimizer, with_plugins
from torchmars.config.parallelism import ParallelismConfig
from torchmars.config.profiler import ProfilerConfig
from torchmars.config.run import RunConfig
from torchmars.config.schedule import ScheduleConfig
from torchmars.config.training import TrainingConfig
from torchmars.config.transfer import TransferConfig, transfer_section
from torchmars.config.validation import ValidationConfig
from torchmars.core.places import place

# Settings that the ranks of a run derive where its config leaves them "auto" or unset.
OF_RANKS = {
    "training.dtype",
    "training.compile",
    "optimizer.matrix_dtype",
}


@dataclass(frozen=True)
class Config:
    """All settings of one run, as files and the command line give them.

    None means "follows from the rest".
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: Annotated[ModelConfig, Mark.REPORTED] = field(default_factory=ModelConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: Annotated[TrainingConfig, Mark.REPORTED] = field(default_factory=TrainingConfig)
    optimizer: Annotated[OptimizerConfig, Mark.REPORTED] = field(default_factory=OptimizerConfig)
    schedule: Annotated[ScheduleConfig, Mark.REPORTED] = field(default_factory=ScheduleConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: Annotated[GuardsConfig, Mark.REPORTED] = field(default_factory=GuardsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def resolve(self) -> "ResolvedConfig":
        """Return the config with derived settings filled in.

        Raises `UserError` for settings that do not go together.
        """
        data = self.data.resolve()
        for section in (
            self.transfer,
            self.training,
            self.schedule,
            self.parallelism,
            self.checkpoint,
        ):
            section.check()
        optimizer = self.optimizer.resolve()
        schedule = self.schedule.resolve(self.training.steps)
        require(
            schedule.min_lr <= optimizer.lr,
            f"schedule.min_lr = {schedule.min_lr} is above optimizer.lr = {optimizer.lr}: "
            "lower schedule.min_lr",
        )
        resolved = {"data": data, "optimizer": optimizer, "schedule": schedule}
        return ResolvedConfig(**vars(self) | resolved)

    @property
    def checkpoints(self) -> PurePath:
        """The folder of the run's checkpoints."""
        named = self.checkpoint.folder
        return self.run.path / "checkpoints" if named is None else place(named)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """All settings of one run, with values where the run has one.

    Dtypes may still be "auto": those follow from the devices (dtypes.py).
    """

    data: ResolvedData
    optimizer: ResolvedOptimizer


def kind_of(model: str) -> type[Config]:
    """Return the config of the model called `model`, with what plugins' model and rules declare.

    Raises `UserError` for a plugin whose model declares nothing that can be used.
    """
    sections: list[Any] = [model_section(model), transfer_section(model)]
    sections.append(with_plugins(OptimizerConfig))
    return config_with(*sections)


@cache
def config_with(model: type[Any], transfer: type[Any], optimizer: type[Any]) -> type[Config]:
    """Return the config that has these sections."""
    if (model, transfer, optimizer) == (ModelConfig, TransferConfig, OptimizerConfig):
        return Config
    sections: list[tuple[str, Any, type[Any]]] = [
        ("model", Annotated[model, Mark.REPORTED], model),
        ("transfer", transfer, transfer),
        ("optimizer", Annotated[optimizer, Mark.REPORTED], optimizer),
    ]
    return make_dataclass(
        "Config",
        [(name, hint, field(default_factory=kind)) for name, hint, kind in sections],
        bases=(Config,),
        frozen=True,
        namespace={"__module__": Config.__module__, "__doc__": Config.__doc__},
    )


def identity_fields(kind: type[Config] = Config) -> list[str]:
    """Return the fields that make a run the same run, as "section.field"."""
    return list(marked(kind, Mark.IDENTITY))


def reported_sections() -> list[str]:
    """Return the sections whose changes are allowed, and listed when a run resumes."""
    return list(marked(Config, Mark.REPORTED))


def marked(kind: type, mark: Mark, prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields of a dataclass, and of those within it, that bear `mark`."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        metadata: tuple[Any, ...] = ()
        if typing.get_origin(hint) is Annotated:
            hint, metadata = hint.__origin__, hint.__metadata__
        if mark in metadata:
            yield f"{prefix}{name}"
        if is_dataclass(hint) and isinstance(hint, type):
            yield from marked(hint, mark, f"{prefix}{name}.")
