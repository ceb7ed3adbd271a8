"""Pipeline parallelism: the stages of a model, and who works on them when."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward  # private, torch 2.11 to 2.15
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)

from torchmars.config import ParallelismConfig, TrainingConfig
from torchmars.parallel.cuts import stage_ranks
from torchmars.parallel.fsdp import set_reduction
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart


class AccumulatingStage(PipelineStage):
    """A stage that accumulates gradients as `parallelism.accumulate` says.

    torch's own keeps the whole gradient, and the weights gathered, to the end of a step.
    """

    def __init__(self, parallelism: ParallelismConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parallelism = parallelism

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """Make the backward pass of a microbatch; return the gradients of the stage's inputs."""
        assert backward_type == "full"
        assert isinstance(self.submod, ModelPart)
        set_reduction(self.submod, self.parallelism, last_backward)
        return stage_backward(**bwd_kwargs), None


class Pipeline:
    """The stages of this rank, and how all ranks of a pipeline run theirs together.

    `parts` are this rank's, by the number of their stage. Hidden states between stages have `width`
    numbers for each token.
    """

    def __init__(
        self,
        parts: dict[int, ModelPart],
        config: ParallelismConfig,
        training: TrainingConfig,
        layout: Layout,
        device: torch.device,
        width: int,
    ) -> None:
        self.parts, self.config, self.device = parts, config, device
        self.ranks, self.rank_of = layout.group("pp"), stage_ranks(config)
        size, self.microbatches = training.microbatches(layout.data.size, config.stages)
        length, self.tp = training.seq_len // layout.group("cp").size, layout.group("tp").size
        # Of a microbatch. Shapes are given: torch would find them by passes of its own.
        self.tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
        self.hidden = torch.empty(
            (size, length // self.tp, width),
            dtype=getattr(torch, training.dtype),
            device="meta",
            requires_grad=True,
        )
        """The tensors that pass from stage to stage, without memory."""
        kind = get_schedule_class(config.pp_schedule)
        self.torch_stages = {
            number: self._torch_stage(number, part) for number, part in parts.items()
        }
        own = list(self.torch_stages.values())
        self.schedule = kind(
            own if issubclass(kind, PipelineScheduleMulti) else own[0],
            n_microbatches=self.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _torch_stage(self, number: int, part: ModelPart) -> PipelineStage:
        loss = torch.empty((), device="meta", requires_grad=True)
        return AccumulatingStage(
            self.config,
            part,
            number,
            len(self.rank_of),
            self.device,
            input_args=(self.tokens if part.first else self.hidden,),
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

    def forward(self, tokens: Tensor, **options: Any) -> Tensor | None:
        """Pass one microbatch through all stages; on the last one's rank, return its result.

        `tokens` is [batch, length]. `options` are passed to `ModelPart.forward`.
        """
        x: Tensor | None = tokens
        shape = tokens.shape[0], tokens.shape[1] // self.tp, self.hidden.shape[-1]
        for number, rank in enumerate(self.rank_of):
            if rank != self.ranks.rank:
                continue
            if number and self.rank_of[number - 1] != rank:
                hidden = torch.empty(shape, dtype=self.hidden.dtype, device=self.device)
                x = self.ranks.receive(hidden, self.rank_of[number - 1])
            x = self.parts[number](x, **options)
            if number + 1 < len(self.rank_of) and self.rank_of[number + 1] != rank:
                self.ranks.send(x, self.rank_of[number + 1])
                x = None
        return x
