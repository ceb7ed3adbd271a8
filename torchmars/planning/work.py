"""What a model and its optimizer take, and which share a rank has: for the formulas of find.py."""

from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from torchmars.config import Degrees
from torchmars.models import Model
from torchmars.models.moe import Experts, MoE
from torchmars.optim import MARS
from torchmars.parallel.cuts import cut_of, head_in_blocks


@dataclass(frozen=True)
class Work:
    """What a model and its optimizer take, whatever the layout. A block is the largest one."""

    model: Model
    """Without memory."""
    parameters: int
    block: int
    """Parameters of a block, without its experts."""
    rest: int
    """Parameters outside of blocks."""
    flops: int
    """Of a token."""
    head_in_blocks: float
    """The FLOPs of the head, in those of a block."""
    keys: int
    """Width of keys and values together."""
    given: int
    """Width of what layers before attention and the activation function give, of a block."""
    taken: int
    """Width of what the layers after them take."""
    experts: int = 0
    """Parameters of all experts."""
    block_experts: int = 0
    """Those of a block's."""
    mixtures: int = 0
    """Blocks that have experts."""
    rows: int = 0
    """Width of what comes to the experts of a block for each token, all that it uses together."""
    inner: int = 0
    """Width within these experts."""
    state: float = 0.0
    """Bytes of the optimizer's state for each parameter."""
    owner_flops: int = 0
    """Of all orthogonalisations of a step."""

    @classmethod
    def of(cls, model: Model) -> Self:
        """Return what `model` takes, without an optimizer."""
        block = max(model.blocks.values(), key=parameters_of)
        matrices = [
            (cut_of(name.removesuffix(".weight"), model.cuts), each)
            for name, each in block.named_parameters()
            if each.ndim == 2
        ]
        work = cls(
            model,
            model.parameter_count,
            parameters_of(block) - experts_of(block),
            model.parameter_count - parameters_of(model.blocks),
            model.flops_per_token(),
            head_in_blocks(model),
            2 * model.heads[1] * model.head_width,
            given=sum(each.shape[0] for cut, each in matrices if cut != "columns"),
            taken=sum(each.shape[1] for cut, each in matrices if cut == "columns"),
        )
        mixtures = [each for each in model.modules() if isinstance(each, MoE)]
        if not mixtures:
            return work
        used, (_, width, inner) = mixtures[-1].router.used, mixtures[-1].experts.proj.shape
        return replace(
            work,
            experts=experts_of(model),
            block_experts=experts_of(block),
            mixtures=len(mixtures),
            rows=used * width,
            inner=used * inner,
        )

    def with_optimizer(self, optimizer: MARS) -> Self:
        """Return the same with what `optimizer` takes, the whole model's, without memory."""
        tensors = [tensor for each in optimizer.state.values() for tensor in each.values()]
        tensors += optimizer.ahead.last_grads.values()
        flops = sum(sum(loads.values()) for loads in optimizer.plans.owner_loads.values())
        state = sum(tensor.nbytes for tensor in tensors) / self.parameters
        return replace(self, state=state, owner_flops=flops)

    def kept(self, tp: int, mode: str, travels: bool) -> float:
        """Return the bytes that a block keeps for each token until its backward pass.

        They are bfloat16. `mode`: of activation checkpointing. `travels`: over the ranks of ep.
        """
        width, whole = self.model.width, self.whole
        if mode == "full":
            return 2 * width / tp
        if mode == "selective":
            # The sums of attention and MLP over tp are whole on each rank before they are added.
            sums = 2 * whole * width if tp > 1 else 0
            experts = 4 * self.inner + (6 if travels else 2) * self.rows
            return 4 * width + (2 * self.given + 4 * width + sums + experts) / tp
        # Each rank has the whole inputs of attention and MLP. What a layer gives is kept once more
        # after an activation function or a rotation. A router has its input in float32.
        cut = 4 * self.given + 2 * self.taken + (12 + 6 * (2 - whole)) * width
        return 2 * whole * width + (cut + 8 * self.inner + 4 * self.rows) / tp

    @property
    def whole(self) -> int:
        """How often a block gathers its tokens over tp: experts take each rank's own."""
        return 1 if self.experts else 2


@dataclass(frozen=True)
class Share:
    """Of how many ranks one has a share, and of what."""

    work: Work
    degrees: Degrees

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards weights over."""
        return self.degrees.dp_shard * self.degrees.cp

    @property
    def expert_shards(self) -> int:
        """Ranks that it shards experts over: tp's have different ones, if they are dealt out."""
        ep = self.degrees.ep
        return self.shards * self.degrees.tp // ep if ep > 1 else self.shards

    @property
    def others(self) -> float:
        """Weights that the rank computes with, but for experts."""
        return (self.work.parameters - self.work.experts) / self.degrees.pp / self.degrees.tp

    @property
    def experts(self) -> float:
        """Weights of the experts that the rank computes with."""
        return self.work.experts / self.degrees.pp / self.degrees.ep

    @property
    def computed(self) -> float:
        """Weights that the rank computes with: gathered, where they are sharded."""
        return self.others + self.experts

    @property
    def held(self) -> float:
        """Weights that the rank has."""
        return self.others / self.shards + self.experts / self.expert_shards

    @property
    def received(self) -> float:
        """Weights that it gets from other ranks, to gather them all."""
        return self.computed - self.held

    @property
    def unit(self) -> float:
        """Weights of the largest unit that is gathered: a block with its experts, or the rest."""
        work, degrees = self.work, self.degrees
        block = work.block / degrees.tp + work.block_experts / degrees.ep
        return max(block, work.rest / degrees.pp / degrees.tp)


def parameters_of(module: nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(each.numel() for each in module.parameters())


def experts_of(module: nn.Module) -> int:
    """Return how many of them are experts'."""
    return sum(parameters_of(each) for each in module.modules() if isinstance(each, Experts))
