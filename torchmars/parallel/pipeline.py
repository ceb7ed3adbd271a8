"""Pipeline parallelism: the stages of a model, where they are cut, and who works on them when."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward  # private, torch 2.11 to 2.13
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)

from torchmars.config import ParallelismConfig
from torchmars.config.parallelism import V_SCHEDULES
from torchmars.core.errors import UserError
from torchmars.models import Model
from torchmars.parallel.fsdp import set_reduction
from torchmars.parallel.layout import RankGroup
from torchmars.parallel.part import Part


def blocks_of_stages(model: Model, parallelism: ParallelismConfig) -> list[range]:
    """Return the numbers of the blocks of each stage of a pipeline.

    The stages follow `parallelism.pp_blocks`, or else are cut so that the costliest is as cheap as
    can be. Raises `UserError` for more stages than blocks, and for blocks that do not add up.
    """
    blocks, stages = len(model.blocks), parallelism.stages
    if parallelism.pp_blocks is not None and sum(parallelism.pp_blocks) != blocks:
        raise UserError(
            f"parallelism.pp_blocks = {list(parallelism.pp_blocks)} deals out "
            f"{sum(parallelism.pp_blocks)} blocks, the model has {blocks}"
        )
    if blocks < stages:
        raise UserError(
            f"{stages} pipeline stages cannot share {blocks} blocks: lower parallelism.pp = "
            f"{parallelism.pp}"
        )
    counts = parallelism.pp_blocks or even_counts(blocks, stages, head_in_blocks(model))
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(first, last) for first, last in zip(starts, starts[1:])]


def head_in_blocks(model: Model) -> float:
    """Return the FLOPs of the head of a whole model, in those of a block."""
    head = 6 * model.vocab_rows * model.width  # for each token
    return head * len(model.blocks) / (model.flops_per_token() - head)


def even_counts(blocks: int, stages: int, head: float) -> list[int]:
    """Return how many blocks each stage gets, at least one.

    The costliest stage is as cheap as can be. The last one also has the head, which costs `head`
    blocks. Looking up an embedding costs nothing.
    """
    costs = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(blocks - stages):
        costs[costs.index(min(costs))] += 1
    return [round(cost) for cost in [*costs[:-1], costs[-1] - head]]


def stage_ranks(parallelism: ParallelismConfig) -> list[int]:
    """Return which rank of the pipeline has each stage."""
    ranks, stages = parallelism.pp, parallelism.stages
    if parallelism.pp_schedule in V_SCHEDULES and stages > 1:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def cut_model(model: Model, blocks: range, first: bool, last: bool) -> None:
    """Take from `model`, in place, what other stages have.

    A token table that is the head too stays in the first and in the last stage.
    """
    model.blocks = nn.ModuleDict({str(number): model.blocks[str(number)] for number in blocks})
    for name in model.inputs:
        if not first and not (last and name == "tok_embed" and model.output is None):
            setattr(model, name, None)
    if not last:
        for name in ("norm", "output"):
            setattr(model, name, None)


class WholeBackwardStage(PipelineStage):
    """A stage that accumulates gradients as `parallelism.accumulate` says.

    torch's own keeps the whole gradient, and the weights gathered, to the end of a step. It has to
    where gradients of inputs and of weights are computed apart: FSDP's hooks see neither then.
    """

    def __init__(self, parallelism: ParallelismConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parallelism = parallelism

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Make the backward pass of a microbatch; return the gradients of what the stage got."""
        assert backward_type == "full"
        set_reduction(self.submod, self.parallelism, last_backward)
        return stage_backward(**bwd_kwargs), None


class Pipeline:
    """The stages of this rank, and how all ranks of a pipeline run theirs together.

    `stages` are this rank's parts by the number of their stage. A rank's microbatch of token ids is
    of shape `tokens` [microbatch size, length], and hidden states between stages are of shape
    `hidden` [microbatch size, length / tp, width] and `dtype`.
    """

    def __init__(
        self,
        stages: dict[int, Part],
        config: ParallelismConfig,
        ranks: RankGroup,
        device: torch.device,
        microbatches: int,
        tokens: tuple[int, int],
        hidden: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self.stages, self.config, self.ranks, self.device = stages, config, ranks, device
        self.microbatches, self.tokens = microbatches, tokens
        self.rank_of = stage_ranks(config)
        self.hidden = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        """What goes from stage to stage, without memory."""
        kind = get_schedule_class(config.pp_schedule)
        self.torch_stages = {
            number: self._torch_stage(number, part) for number, part in stages.items()
        }
        own = list(self.torch_stages.values())
        self.schedule = kind(
            own if issubclass(kind, PipelineScheduleMulti) else own[0],
            n_microbatches=microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _torch_stage(self, number: int, part: Part) -> PipelineStage:
        # Shapes are given: torch would find them by a forward and a backward pass of its own.
        tokens = torch.empty(self.tokens, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        kind = (
            PipelineStage
            if self.config.splits_backward
            else partial(WholeBackwardStage, self.config)
        )
        return kind(
            part,
            number,
            len(self.rank_of),
            self.device,
            input_args=(tokens if part.first else self.hidden,),
            output_args=(loss if part.last else self.hidden,),
            group=self.ranks.process_group,
        )

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        return loss / self.microbatches

    def backward(self, tokens: Tensor, targets: Tensor, starts: Tensor | None) -> Tensor:
        """Accumulate the gradient of the mean loss; return it, or 0 on ranks without the last part.

        `tokens` and `targets` [batch, length], and `starts` [batch, documents], are those of all
        microbatches of a step.
        """
        losses: list[Tensor] = []
        self.schedule.step(
            tokens,
            target=targets,
            losses=losses,
            return_outputs=False,
            targets=targets,
            starts=starts,
        )
        return torch.stack([torch.zeros((), device=self.device), *losses]).detach().sum()

    def forward(self, tokens: Tensor, hidden_length: int, **options: Any) -> Tensor | None:
        """Pass one microbatch through all stages; return what the last one gives, where that is.

        `tokens` is [batch, length], and hidden states between stages are [batch, hidden_length,
        width]. `options` are those of `Part.forward`.
        """
        x: Tensor | None = tokens
        shape = tokens.shape[0], hidden_length, self.hidden.shape[-1]
        for number, rank in enumerate(self.rank_of):
            if rank != self.ranks.rank:
                continue
            if number and self.rank_of[number - 1] != rank:
                hidden = torch.empty(shape, dtype=self.hidden.dtype, device=self.device)
                x = self.ranks.receive(hidden, self.rank_of[number - 1])
            x = self.stages[number](x, **options)
            if number + 1 < len(self.rank_of) and self.rank_of[number + 1] != rank:
                self.ranks.send(x, self.rank_of[number + 1])
                x = None
        return x
