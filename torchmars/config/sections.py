"""The sections of a config: here the small ones, and all of them together.

A section is a frozen dataclass, with a sentence under each field. `training`, `parallelism`,
`data`, `optimizer` and `model` have files of their own.
"""

import glob
import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from torchmars.config.data import DataConfig, ResolvedData
from torchmars.config.fields import Amount, Count, Mark, MoreThan0, Positive, require
from torchmars.config.model import ModelConfig, TransferConfig, model_section, transfer_section
from torchmars.config.optimizer import OptimizerConfig, optimizer_section
from torchmars.config.parallelism import ParallelismConfig
from torchmars.config.training import TrainingConfig
from torchmars.core.check import Interval, Name, Place
from torchmars.core.errors import UserError
from torchmars.core.files import PARTIAL
from torchmars.core.places import place

HF = "hf:"  # begins the name of a folder of transformers, or of a model of the hub
# Where a run writes in its folder, under names that anybody knows before.
FILES = ("lock", "events.jsonl", "output.log", f"*{PARTIAL}", "logs/*")
FOLDERS = ("logs", "hang", "profile", "tokenizer")
# Settings that the ranks of a run derive where its config leaves them "auto" or unset.
OF_RANKS = {"training.dtype", "training.compile", "optimizer.matrix_dtype"}


@dataclass(frozen=True)
class RunConfig:
    """The name of the run, and its folder."""

    name: Annotated[str, Name()] = "run"
    """Name of the run. Its folder is FOLDER/NAME. A run found there is continued. Default with a
    config: the name of its first file, without .toml."""
    folder: Annotated[str, Place()] = "runs"
    """Folder that holds all runs."""
    plugins: list[str] = field(default_factory=list)
    """Python modules of yours that register models, rules, kinds of data or trackers:
    docs/extending.md. Also --plugins A,B."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1), Mark.IDENTITY] = 0
    """Seed of the initial weights and of the data order."""

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return Path(self.folder) / self.name

    @property
    def tokenizer(self) -> Path:
        """The folder of a copy of the run's tokenizer, if that is a file."""
        return self.path / "tokenizer"

    @property
    def compile_cache(self) -> Path:
        """The folder where torch.compile keeps what it has compiled for the run."""
        return self.path / "compile_cache"

    @property
    def lock(self) -> Path:
        """The file that is locked while the run trains."""
        return self.path / "lock"

    @property
    def hang(self) -> Path:
        """The folder where ranks write where they stand once one of them hangs."""
        return self.path / "hang"

    def check_links(self) -> None:
        """Raise `UserError` for a link in the run's folder where the run writes.

        It may lead to files of somebody else. The folder itself may be a link.
        """
        folder = glob.escape(str(self.path))
        for name in (*FOLDERS, *FILES):
            for path in filter(os.path.islink, glob.iglob(f"{folder}/{name}")):
                raise UserError(f"{path} is a link, and the run writes there: remove it")


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


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Which activations of each block are recomputed in the backward pass, instead of kept: less
    memory, more work, the same gradients."""

    mode: Literal["none", "full", "selective"] = "none"
    """none: keep all. full: keep what enters a block only, and compute the rest again. selective:
    keep the results of matrix products and of attention too, and what ranks of tp and cp got from
    each other by reduce-scatters and all-to-alls."""


@dataclass(frozen=True)
class Origin(Place):
    """Bounds of the place that a run starts from. Files of weights alone are local."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        kind = HF if value.startswith(HF) else ""
        of_stores = not kind and not value.endswith(".safetensors")
        return kind + Place(stores=of_stores).check(value.removeprefix(kind))


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved and which checkpoints are kept.

    A run continues from its newest good checkpoint.
    """

    folder: Annotated[str, Place(stores=True)] | None = None
    """Where checkpoints are kept: a folder, or one of an object store, as s3://BUCKET/RUN, of this
    run alone. Default: checkpoints in the run's own folder."""
    interval: Count = 100
    """Steps between checkpoints. 0: only at the end."""
    at_end: bool = True
    """Save the run when it is complete. false is for runs whose weights nobody needs."""
    async_save: bool = True
    """Train on while a checkpoint is written. Takes memory for a copy of weights and optimizer
    state on the host."""
    memory_interval: Count = 0
    """Steps between copies in the memory of each machine (/dev/shm), from which ranks that
    MAX_RESTARTS starts again resume. They keep two copies, with several machines four. 0: none."""
    max_failures: Positive = 3
    """Checkpoints in a row that may fail to be written before the run ends."""
    keep_last: Count = 10
    """Newest checkpoints to keep. 0: all."""
    keep_every: Count = 0
    """Keep the checkpoints of every such step for good. 0: none."""
    keep_best: bool = True
    """Keep the checkpoint of the lowest validation loss."""
    verify: Literal["full", "size", "off"] = "full"
    """How a checkpoint is checked before it is loaded. full: size and SHA-256 of every file. size:
    sizes only. off: nothing."""
    init_from: Annotated[str, Origin()] | None = None
    """Start from the weights of another run, of one checkpoint, of a folder or a .safetensors file
    that torchmars export made, or of a model of Hugging Face's transformers: hf:FOLDER, or hf:NAME
    of the hub. Has no effect once the run has a checkpoint of its own."""
    init_optimizer: bool = False
    """Take the optimizer's state from init_from too, as far as this optimizer has use for it."""

    def check(self) -> None:
        """Raise `UserError` for settings that do not go together."""
        require(
            self.init_from is not None or not self.init_optimizer,
            "checkpoint.init_optimizer has no meaning without checkpoint.init_from: set that too",
        )


@dataclass(frozen=True)
class GuardsConfig:
    """Guards of a run while it trains. A gradient that is not finite always skips its step."""

    loss_spike: Literal["off", "skip"] = "off"
    """The reaction to a batch whose loss is an outlier. skip: leave its step out, for which ranks
    wait for the loss at every step."""
    spike_sigmas: MoreThan0 = 6.0
    """Standard deviations above the mean of the last 64 losses, from which a loss is an outlier."""
    hang_seconds: Amount = 600.0
    """Seconds without a step after which a rank is taken to hang. Every rank then says where it
    stands, and the run ends. Must be more than the longest step, compilation, validation or save. 0
    disables it. The backend's timeouts still apply: 30 minutes; 10 in HSDP on GPUs."""


@dataclass(frozen=True)
class ValidationConfig:
    """The held-out loss, always over the same windows of the validation split."""

    interval: Count = 100
    """Steps between validations, and one at the end. 0: never."""
    windows: Positive = 64
    """Sequences of training.seq_len tokens, spread evenly over the split."""
    sample_tokens: Count = 0
    """Tokens of text to sample when the run is complete. 0: none."""
    sample_prompt: str = "\n"
    """Text that the sample continues. Default: a line break."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks that the model is asked while it trains, as torchmars evaluate asks them."""

    tasks: list[Annotated[str, Place()]] = field(default_factory=list)
    """Tasks of the package lm_eval, by its names, or files *.yaml that describe tasks of your own.
    Such a file may name Python code, which runs."""
    interval: Count = 1000
    """Steps between evaluations, and one at the end. 0: never."""
    shots: Count | None = None
    """Solved examples before each question, by default as many as the task says, mostly 0."""
    limit: Positive | None = None
    """Take only the first so many questions of each task."""
    batch_size: Positive = 16
    """Texts of the model's length that a rank scores at once, and of shorter ones more."""


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


@dataclass(frozen=True)
class ProfilerConfig:
    """Records for a closer look, in the folder profile of the run.

    Recording slows the run down.
    """

    start: Count = 0
    """First step of a trace by torch.profiler, a file for each rank. 0: no trace."""
    steps: Positive = 3
    """Steps of the trace."""
    memory: bool = False
    """Record what allocates memory on GPUs. A rank that runs out of it writes a snapshot."""


@dataclass(frozen=True)
class Config:
    """All settings of one run. None means "follows from the rest"."""

    run: RunConfig = field(default_factory=RunConfig)
    model: Annotated[ModelConfig, Mark.REPORTED] = field(default_factory=lambda: model_section()())
    transfer: TransferConfig = field(default_factory=lambda: transfer_section()())
    data: DataConfig = field(default_factory=DataConfig)
    training: Annotated[TrainingConfig, Mark.REPORTED] = field(default_factory=TrainingConfig)
    optimizer: Annotated[OptimizerConfig, Mark.REPORTED] = field(
        default_factory=lambda: optimizer_section()()
    )
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

    Dtypes may still be "auto": those follow from the devices (ranks.py).
    """

    data: ResolvedData


def sections_of(model: str = "gpt2", rule: str = "mars-adamw") -> dict[str, type]:
    """Return the class of each section, with the settings of the chosen family and rule.

    Raises `UserError` for a name that nobody has registered.
    """
    hints = typing.get_type_hints(Config)
    chosen = {
        "model": model_section(model),
        "transfer": transfer_section(model),
        "optimizer": optimizer_section(rule),
    }
    return {each.name: chosen.get(each.name, hints[each.name]) for each in fields(Config)}


def identity_fields(config: Config) -> list[str]:
    """Return the fields that make a run the same run, as "section.field"."""
    sections = {each.name: type(getattr(config, each.name)) for each in fields(config)}
    return [name for section, kind in sections.items() for name in marked(kind, f"{section}.")]


def marked(kind: type, above: str, mark: Mark = Mark.IDENTITY) -> Iterator[str]:
    """Yield the names of the fields of a dataclass, and of those within it, that bear `mark`."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        metadata: tuple[Any, ...] = getattr(hint, "__metadata__", ())
        inner = hint.__origin__ if metadata else hint
        if mark in metadata:
            yield f"{above}{name}"
        if is_dataclass(inner) and isinstance(inner, type):
            yield from marked(inner, f"{above}{name}.", mark)


def reported_sections() -> list[str]:
    """Return the sections whose changes are allowed, and listed when a run resumes."""
    hints = typing.get_type_hints(Config, include_extras=True)
    return [
        name for name, hint in hints.items() if Mark.REPORTED in getattr(hint, "__metadata__", ())
    ]
