"""How long a run is, how large its batch, in which precision."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchmars.config.fields import Amount, Clip, Mark, Part, Positive, require
from torchmars.core.check import Interval
from torchmars.core.words import counted


@dataclass(frozen=True)
class Float8Config:
    """Which matrix products are computed in float8, by torchao. Weights stay float32."""

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the linear layers of all blocks in float8, those whose two sizes are multiples of 16.
    tensorwise: one scale for each matrix, the fastest. rowwise: one for each row, closer to
    bfloat16. Needs a GPU of compute capability 8.9 (L4, H100) or later, and pays with compiled
    blocks only."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how large a batch, in which precision."""

    steps: Positive = 300
    """Optimizer steps of the whole run. Raise it to continue a finished run."""
    stop_after: Positive | None = None
    """End after this step, saved, though the schedule goes on to `steps`: a short look at a long
    run. The same command with a higher value, or without one, resumes. Default: none."""
    global_batch_size: Positive = 16
    """Sequences per optimizer step, over all ranks and accumulation steps."""
    microbatch_size: Positive | None = None
    """Sequences per forward pass on one rank; the gradient of the rest is accumulated. Default:
    the rank's whole share of the global batch; in a pipeline, as many as give each of its stages
    a microbatch."""
    seq_len: Annotated[int, Interval(ge=1, le=10_000_000), Mark.IDENTITY] = 256
    """Tokens per sequence. Also the model's context length."""
    max_grad_norm: Clip = 1.0
    """Clip the gradient's global norm to this before the optimizer. 0 switches it off."""
    z_loss: Part = 0.0
    """Coefficient of the z-loss, which keeps logits from drifting: so many times the mean square of
    the logarithm of the softmax's denominator is added to the loss. PaLM had 1e-4. The losses that
    are reported are without it. 0: none."""
    qk_clip: Amount = 0.0
    """QK-clip: where a head's largest attention logit in a step was above this, scale its query and
    key weights after the step, so that it would have been this. Kimi K2 had 100. 0: never."""
    balance_loss: Part = 0.0
    """Coefficient of the loss that keeps the experts of a mixture equally busy. Of each layer so
    many times E * sum_i f_i P_i is added to the loss: f_i is the share of expert i, of E, in the
    choices of the last step's global batch, and P_i the mean of its probability in this one. That
    is 1 where all are equal. The layers are summed, and f sums to 1: other codes have the mean over
    layers, or f times the choices of a token. The losses that are reported are without it. 0: none.
    """
    router_z_loss: Part = 0.0
    """Coefficient of the z-loss of the routers, which keeps their logits from growing: of each
    layer so many times the mean square of the logarithm of the softmax's denominator is added to
    the loss. The losses that are reported are without it. 0: none."""
    balance_rate: Part = 1e-3
    """How far a step moves the biases by which sigmoid routers balance their experts: so far up
    where an expert had fewer tokens than the mean, so far down where it had more. Other routers
    have none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. Master weights, gradient reduction and optimizer state are float32. Losses
    agree between layouts to 1e-5 in float32, to 1e-3 in bfloat16. bfloat16 is faster on CPUs that
    have instructions for it, and many times slower on others. auto: bfloat16 on GPU, float32 on
    CPU. A run keeps what it began with unless this names another."""
    ema_decay: Annotated[float, Interval(ge=0, le=0.999_999)] = 0.0
    """Also keep an exponential moving average of the weights, in float32. Each step leaves this
    part of it: 0.999 averages about the last 1,000 steps. torchmars export --ema writes it. 0: no
    average."""
    compile: bool | None = None
    """Compile each block, on one GPU up to 16 together, and the loss, by torch.compile. Default: on
    GPUs, where the config allows it. A run keeps what it began with unless this names another,
    since the two agree to rounding only."""
    deterministic: Annotated[bool, Mark.IDENTITY] = False
    """Add up every sum in one order, on GPUs too, so that the same run on the same machines gives
    the same bits. It costs time there. On CPUs a run gives the same bits without it."""
    float8: Float8Config = field(default_factory=Float8Config)
    """Matrix products in float8."""

    def check(self) -> None:
        """Raise `UserError` for a batch beyond any sensible size, and for settings of `float8`."""
        require(
            self.tokens_per_step <= 10**11,
            f"training.global_batch_size = {self.global_batch_size} times "
            f"training.seq_len = {self.seq_len} must be at most {10**11:,} tokens a step: "
            "lower one of them",
        )

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.steps, self.stop_after or self.steps)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.tokens_per_step

    def microbatches(self, data_ranks: int, stages: int = 1) -> tuple[int, int]:
        """Return the microbatch size of a rank and the number of accumulation steps.

        `data_ranks` ranks read different data; each sample passes through `stages` stages of a
        pipeline. Raises `UserError` with the numbers if they do not divide, or if there are fewer
        microbatches than stages.
        """
        require(
            self.global_batch_size % data_ranks == 0,
            f"training.global_batch_size = {self.global_batch_size} does not divide over "
            f"{data_ranks} data-parallel ranks: choose a multiple of {data_ranks}",
        )
        per_rank = self.global_batch_size // data_ranks
        size = self.microbatch_size or max(
            (size for size in range(1, per_rank // stages + 1) if per_rank % size == 0), default=1
        )
        require(
            per_rank % size == 0,
            f"training.microbatch_size = {size} does not divide the "
            f"{counted(per_rank, 'sequence')} of each rank (training.global_batch_size = "
            f"{self.global_batch_size} over {counted(data_ranks, 'rank')}): choose "
            + f"a divisor of {per_rank}",
        )
        require(
            per_rank // size >= stages,
            f"the {per_rank} sequences of each rank make {per_rank // size} microbatches of "
            f"training.microbatch_size = {size}, fewer than the {stages} stages of the pipeline: "
            "raise training.global_batch_size, or lower the microbatch size or parallelism.pp",
        )
        return size, per_rank // size
