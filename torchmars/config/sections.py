"""Every knob of a run: one dataclass per section of the TOML file.

`config_file.py` reads and writes them; each part of the stack takes its own section. Bounds stand
beside the types.
A field set to None means "follows from the rest"; `Config.resolve` fills it in.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from torchmars.core.errors import UserError
from torchmars.core.typed import Name, Place, Range, check_bounds

Rule = Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "lion", "muon"]
MARS_RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
OPTIMIZER_SETTINGS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "gamma",
    "clip",
    "optimize_1d",
    "lr_1d",
    "betas_1d",
    "weight_decay_1d",
)

# Upper bounds are beyond all that is meant, and below what overflows.
Count = Annotated[int, Range(0, 1_000_000_000)]
Positive = Annotated[int, Range(1, 1_000_000_000)]
Amount = Annotated[float, Range(0, 1_000_000)]
Clip = Annotated[float, Range(0, float("inf"))]


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def set_fields(section: object) -> dict[str, Any]:
    """The fields of a section that are not None."""
    return {
        each.name: getattr(section, each.name)
        for each in fields(section)
        if getattr(section, each.name) is not None
    }


@dataclass
class RunConfig:
    """What the run is called and where it lives."""

    section = "run"
    name: Annotated[str, Name("folder")] = "quickstart"
    """Name of the run; its folder is FOLDER/NAME. A run found there is continued."""
    folder: Annotated[str, Place()] = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the initial weights and of the data order."""

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return Path(self.folder) / self.name

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"


@dataclass
class ModelConfig:
    """Which model is trained."""

    section = "model"
    name: Literal["gpt2"] = "gpt2"
    """Model family."""
    size: Literal["nano", "small", "medium", "large", "xl"] = "nano"
    """Named size: nano (3M, for CPUs), small (124M), medium (354M), large (773M), xl (1.6B)."""
    n_layer: Annotated[int, Range(1, 1_000)] | None = None
    """Number of blocks, instead of the named size's."""
    n_head: Annotated[int, Range(1, 10_000)] | None = None
    """Attention heads per block, instead of the named size's."""
    n_embd: Annotated[int, Range(1, 1_000_000)] | None = None
    """Width, instead of the named size's."""
    vocab_size: Annotated[int, Range(1, 10_000_000)] | None = None
    """Rows of the token table; default: the tokenizer's vocabulary rounded up to a multiple of 64."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide attention logits also by the block's number, counted from 1, as the published MARS runs did."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Probability of dropout on embeddings, attention and both outputs of a block, while training."""


@dataclass
class DataConfig:
    """Where the tokens come from."""

    section = "data"
    corpus: Literal["stdlib", "text"] = "stdlib"
    """Text to train on: stdlib (the Python standard library's sources) or text (your own files)."""
    files: list[Annotated[str, Place()]] = field(default_factory=list)
    """For corpus "text": files, folders (every .txt and .md below) and globs. A line `<|endoftext|>` ends a document."""
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """bytes (256 values and an end-of-text token) or gpt2 (BPE, 50257 tokens)."""
    path: Annotated[str, Place()] | None = None
    """Folder of the tokenised shards; default: data/CORPUS-TOKENIZER. Filled on the first run."""
    validation_fraction: Annotated[float, Range(0, 0.5, open_low=True)] = 0.01
    """Share of the tokens kept for validation, by whole documents."""
    num_workers: Annotated[int, Range(0, 64)] = 1
    """Processes per rank that read ahead; 0 reads in the training process."""

    def check(self) -> None:
        require(
            self.corpus != "text" or bool(self.files) or self.path is not None,
            'data.files is empty: name the files, folders or globs that data.corpus = "text" reads',
        )
        require(
            self.corpus == "text" or not self.files,
            f'data.files has no meaning for data.corpus = "{self.corpus}": set data.corpus = "text"',
        )


@dataclass
class TrainingConfig:
    """How long, how large a batch, in which precision."""

    section = "training"
    steps: Positive = 300
    """Optimizer steps of the whole run. Raise it to continue a finished run."""
    global_batch_size: Positive = 16
    """Sequences per optimizer step, over all ranks and accumulation steps."""
    microbatch_size: Positive | None = None
    """Sequences per forward pass on one rank; default: its whole share of the global batch. The gradient of the
    rest is accumulated."""
    seq_len: Annotated[int, Range(1, 10_000_000)] = 256
    """Tokens per sequence; also the model's context length."""
    max_grad_norm: Clip = 1.0
    """Clip the gradient's global norm to this before the optimizer; 0 switches it off."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. Master weights, gradient reduction and optimizer state are float32. auto: bfloat16 on GPU,
    float32 on CPU, so that losses agree between layouts to 1e-5; in bfloat16 they agree to 1e-3.
    bfloat16 is faster on CPUs that have instructions for it, and many times slower on others. A
    run keeps what it began with unless this names another."""
    compile: bool = False
    """Compile each block with torch.compile."""

    def check(self) -> None:
        tokens = self.global_batch_size * self.seq_len
        require(
            tokens <= 10**11,
            f"training.global_batch_size = {self.global_batch_size} times "
            f"training.seq_len = {self.seq_len} must be at most {10**11:,} tokens a step: "
            "lower one of them",
        )

    def microbatches(self, dp_size: int) -> tuple[int, int]:
        """The microbatch size per rank and the number of accumulation steps on `dp_size` data-parallel ranks.

        Raises `UserError` with the numbers where they do not divide.
        """
        require(
            self.global_batch_size % dp_size == 0,
            f"training.global_batch_size = {self.global_batch_size} does not divide over {dp_size} data-parallel "
            f"ranks: choose a multiple of {dp_size}",
        )
        per_rank = self.global_batch_size // dp_size
        size = self.microbatch_size or per_rank
        require(
            per_rank % size == 0,
            f"training.microbatch_size = {size} does not divide the {per_rank} sequences of each rank "
            f"(training.global_batch_size = {self.global_batch_size} over {dp_size} ranks): choose a divisor of {per_rank}",
        )
        return size, per_rank // size


@dataclass
class GroupConfig:
    """Settings of one group of parameters, in place of the optimizer's. What is not set follows from optimizer.name."""

    rule: Rule | None = None
    """Update rule: mars-adamw, mars-lion, mars-shampoo, mars-m, adamw, lion or muon."""
    lr: Amount | None = None
    """Learning rate; it follows the schedule in proportion."""
    betas: tuple[float, float] | None = None
    """Decay of the momentum and of the second moment."""
    weight_decay: Amount | None = None
    """Decoupled weight decay."""
    gamma: Amount | None = None
    """mars-*: strength of the variance reduction."""
    clip: Clip | None = None
    """mars-*: clip each tensor's corrected gradient to this norm; 0 switches it off."""
    split: Positive | None = None
    """Matrix rules: parts that a matrix is cut into by rows before it is orthogonalised (3 for a fused QKV)."""


@dataclass
class PatternConfig(GroupConfig):
    """A group of the parameters whose name matches a pattern."""

    pattern: str = ""
    """Pattern of parameter names, as a shell's: "blocks.*.attn.qkv.weight"."""


@dataclass
class OptimizerConfig:
    """Which update rule, with which settings. Defaults are the published ones for GPT-2 small, where there are any."""

    section = "optimizer"
    name: Rule = "mars-adamw"
    """mars-adamw, mars-lion, mars-shampoo, mars-m: variance-reduced AdamW, Lion, Shampoo and Muon; adamw, lion, muon: the same
    without the reduction. What embeddings and vectors get is printed at the start of a run."""
    lr: Annotated[float, Range(0, 1_000_000, open_low=True)] | None = None
    """Peak learning rate of the matrices; default 6e-3 for mars-adamw, mars-m and muon, 2e-2 for mars-shampoo (its embeddings get 0.3
    of it), 6e-4 for mars-lion and adamw, 1e-4 for lion."""
    betas: tuple[float, float] | None = None
    """Momentum and second-moment decay; default 0.95 0.99 for mars-* and muon, 0.9 0.95 for adamw, 0.9 0.99 for lion."""
    eps: Amount | None = None
    """Added to the root of the second moment; default 1e-8."""
    weight_decay: Amount | None = None
    """Decoupled weight decay; default 0.01 for mars-adamw and mars-shampoo, 0.5 for lion, 0.1 for the others."""
    gamma: Amount | None = None
    """mars-*: strength of the variance reduction; default 0.025. 0.025 to 0.05 works best. A schedule: schedule.gamma."""
    clip: Clip | None = None
    """mars-*: clip each tensor's corrected gradient to this norm; default 1, 0 switches it off. Without it the rules other than mars-adamw
    keep one buffer per parameter."""
    mode: Literal["approx", "exact"] = "approx"
    """mars-*: correct by the last step's gradient (approx), or by this batch's gradient at the last weights (exact), which costs
    a second forward and backward pass."""
    last_grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """mars-*: what the last gradient is kept in."""
    matrix_dtype: Literal["auto", "bfloat16", "mixed", "float32"] = "auto"
    """Matrix rules: what matrices travel to their owners in and are multiplied in. mixed: they are
    multiplied in float32; input and direction are rounded to bfloat16, in which they travel. auto:
    bfloat16 where every rank has instructions for it, else mixed. A run keeps what it began with
    unless this names another."""
    overlap: bool = True
    """Matrix rules: let the transfers of matrices overlap with the work on others."""
    optimize_1d: bool | None = None
    """mars-adamw, mars-lion, mars-shampoo: give vectors (norm weights, biases) MARS too, instead of AdamW; default false."""
    lr_1d: Amount | None = None
    """Those three: learning rate of the vectors' AdamW; default lr / 2, 3e-3 for mars-shampoo. It follows the schedule in proportion."""
    betas_1d: tuple[float, float] | None = None
    """mars-*, muon: betas of AdamW, for vectors and (mars-m, muon) embeddings; default 0.9 0.95."""
    weight_decay_1d: Amount | None = None
    """mars-adamw, mars-lion, mars-shampoo: weight decay of the vectors' AdamW; default 0.1."""
    matrix: GroupConfig = field(default_factory=GroupConfig)
    """Hidden matrices."""
    embedding: GroupConfig = field(default_factory=GroupConfig)
    """Token and position embeddings."""
    head: GroupConfig = field(default_factory=GroupConfig)
    """An output layer of its own."""
    vector: GroupConfig = field(default_factory=GroupConfig)
    """Norm weights and biases."""
    groups: list[PatternConfig] = field(default_factory=list)
    """[[optimizer.groups]] tables: parameters by name; the first pattern that matches claims them. In TOML only."""

    def settings(self) -> dict[str, Any]:
        """The arguments of `param_groups` but the model."""
        own = {
            key: getattr(self, key) for key in OPTIMIZER_SETTINGS if getattr(self, key) is not None
        }
        by_role = {
            role: set_fields(getattr(self, role))
            for role in ("matrix", "embedding", "head", "vector")
        }
        by_pattern = [
            (
                group.pattern,
                {key: value for key, value in set_fields(group).items() if key != "pattern"},
            )
            for group in self.groups
        ]
        return own | {
            "name": self.name,
            "by_role": {role: given for role, given in by_role.items() if given},
            "by_pattern": by_pattern,
        }

    def check(self) -> None:
        """Check, and fill in the rule's defaults. Raises `UserError` for a value or a setting the rule cannot take."""
        # Here, for it imports torch, which takes seconds.
        from torchmars.optim.param_groups import check_groups, complete_settings

        require(
            self.name in MARS_RULES or self.mode == "approx",
            f'optimizer.mode has no meaning for optimizer.name = "{self.name}"',
        )
        given = {
            key: getattr(self, key) for key in OPTIMIZER_SETTINGS if getattr(self, key) is not None
        }
        try:
            for name, value in complete_settings(self.name, **given).items():
                setattr(self, name, value)
            check_groups(**self.settings())
        except ValueError as error:
            raise UserError(f"optimizer.{error}") from None


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    section = "schedule"
    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What follows the warmup: cosine or linear decay over the rest of the run, constant, or wsd (constant, then a
    linear decay over the last decay_steps)."""
    warmup_steps: Count = 0
    """Steps of linear warmup from 0."""
    decay_steps: Count | None = None
    """wsd: steps of the final decay; default: a fifth of the run."""
    min_lr: Amount = 0.0
    """Learning rate at the end of the decay, an absolute value."""
    gamma: Literal["constant", "linear", "cosine"] = "constant"
    """How MARS's gamma goes from optimizer.gamma to final_gamma over the run."""
    final_gamma: Amount | None = None
    """gamma at the last step, for a linear or cosine schedule of it."""

    def check(self) -> None:
        require(
            (self.gamma == "constant") == (self.final_gamma is None),
            'schedule.final_gamma goes with schedule.gamma = "linear" or "cosine": set both or neither',
        )
        require(
            self.name == "wsd" or self.decay_steps is None,
            f'schedule.decay_steps has no meaning for schedule.name = "{self.name}": remove it',
        )


class Degrees(NamedTuple):
    """The sizes of the mesh's axes, and of `ep`, a second view over the inner ones."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def data(self) -> int:
        """How many ranks read different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass
class ParallelismConfig:
    """How the ranks share the work. dp_replicate * dp_shard is the number of ranks."""

    section = "parallelism"
    dp_replicate: Positive = 1
    """Copies of the model; with dp_shard > 1 this is HSDP."""
    dp_shard: Annotated[int, Range(-float("inf"), 1_000_000_000)] = -1
    """Ranks over which each copy is sharded (FSDP2); -1: all that remain."""

    def check(self) -> None:
        require(
            self.dp_shard == -1 or self.dp_shard >= 1,
            f"parallelism.dp_shard must be -1 (the rest) or at least 1, got {self.dp_shard}",
        )

    def degrees(self, world_size: int) -> Degrees:
        """Return the sizes of all axes on `world_size` ranks.

        Raises `UserError` with the numbers where they do not fit.
        """
        shard = world_size // self.dp_replicate if self.dp_shard == -1 else self.dp_shard
        require(
            self.dp_replicate * shard == world_size,
            f"parallelism.dp_replicate = {self.dp_replicate} times parallelism.dp_shard = {self.dp_shard} does not "
            f"make {world_size} ranks: change them or the number of ranks (NGPU)",
        )
        return Degrees(dp_replicate=self.dp_replicate, dp_shard=shard)


@dataclass
class CheckpointConfig:
    """When the run is saved and what is kept. It always is saved at the end; a run continues from its newest good checkpoint."""

    section = "checkpoint"
    interval: Count = 100
    """Steps between checkpoints; 0: only at the end."""
    interval_minutes: Amount = 0.0
    """Also save once this many minutes have passed since the last save; 0: never."""
    async_save: bool = True
    """Train on while a checkpoint is written. Takes memory for a copy of weights and optimizer state on the host."""
    max_failures: Positive = 3
    """Checkpoints in a row that may fail to be written before the run ends."""
    keep_last: Count = 10
    """Newest checkpoints to keep; 0: all."""
    keep_every: Count = 0
    """Keep the checkpoints of every such step for good; 0: none."""
    keep_best: bool = True
    """Keep the checkpoint of the lowest validation loss."""
    verify: Literal["full", "size", "off"] = "full"
    """What is checked of a checkpoint before it is loaded: size and SHA-256 of every file, sizes only, or nothing."""
    init_from: Annotated[str, Place()] | None = None
    """Start from the weights of another run, of one checkpoint, or of a file made by torchmars.export. Has no effect once the run has
    a checkpoint of its own."""
    init_optimizer: bool = False
    """Take the optimizer's state from init_from too, as far as this optimizer has use for it."""

    def check(self) -> None:
        require(
            self.init_from is not None or not self.init_optimizer,
            "checkpoint.init_optimizer has no meaning without checkpoint.init_from: set that too",
        )


@dataclass
class GuardsConfig:
    """What is watched while a run trains. A gradient that is not finite always skips its step."""

    section = "guards"
    loss_spike: Literal["off", "skip", "rollback"] = "off"
    """What to do with a batch whose loss stands out: leave its step out (skip), or go back to the newest checkpoint and on with the
    data after that batch (rollback). Both wait for the loss at every step."""
    spike_sigmas: Annotated[float, Range(0, 1_000_000, open_low=True)] = 6.0
    """A loss stands out when it is this many standard deviations above the mean of the last 64."""
    hang_seconds: Amount = 600.0
    """Seconds without a step after which a rank is taken to hang: every rank tells where it stands, and the run ends. Must be more
    than the longest step, compilation, validation or save. 0: never, but for the backend's own timeouts: 30 minutes, 10 in HSDP on GPUs."""


@dataclass
class ValidationConfig:
    """The held-out loss, always over the same windows of the validation split."""

    section = "validation"
    interval: Count = 100
    """Steps between validations, and one at the end; 0: never."""
    windows: Positive = 64
    """Sequences of training.seq_len tokens, spread evenly over the split."""
    sample_tokens: Count = 0
    """Tokens of text to sample when the run is complete; 0: none."""
    sample_prompt: str = "\n"
    """Text that the sample continues."""


@dataclass
class MetricsConfig:
    """What is reported. metrics.jsonl in the run folder is always written."""

    section = "metrics"
    log_interval: Positive = 10
    """Steps between progress lines."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder (pip install 'torchmars[tensorboard]')."""
    wandb: bool = False
    """Also log to Weights & Biases; WANDB_MODE=offline keeps it on this machine."""
    wandb_project: str = "torchmars"
    """W&B project."""


@dataclass
class Config:
    """All settings of one run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def resolve(self) -> None:
        """Check every section, then fill in what follows from the rest. Raises `UserError`."""
        check_bounds(self, Config)
        for section in (self.data, self.training, self.schedule, self.parallelism, self.checkpoint):
            section.check()
        self.optimizer.check()
        if self.data.path is None:
            self.data.path = f"data/{self.data.corpus}-{self.data.tokenizer}"
        if self.schedule.name == "wsd" and self.schedule.decay_steps is None:
            self.schedule.decay_steps = self.training.steps // 5
        require(
            self.schedule.final_gamma is None or self.optimizer.name in MARS_RULES,
            f'schedule.gamma has no meaning for optimizer.name = "{self.optimizer.name}": remove it',
        )
        require(
            self.schedule.min_lr <= self.optimizer.lr,
            f"schedule.min_lr = {self.schedule.min_lr} is above optimizer.lr = {self.optimizer.lr}: lower it",
        )
