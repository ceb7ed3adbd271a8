"""A model on its layout: the parts that this rank has, and how the ranks run them together."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models import Model
from torchmars.models.initialize import init_weights
from torchmars.parallel.activations import checkpoint_blocks
from torchmars.parallel.attention_logits import AttentionLogits
from torchmars.parallel.balance import Balance
from torchmars.parallel.batches import Batches
from torchmars.parallel.context import Exchanged, Gathered, SequencePart
from torchmars.parallel.cuts import blocks_of_stages, cut_model, sequence_unit, stage_ranks
from torchmars.parallel.experts import deal_out_experts
from torchmars.parallel.float8 import convert_layers
from torchmars.parallel.fsdp import (
    Copies,
    call_before_reduction_ends,
    is_alone,
    set_reduction,
    shard,
    weight_device,
)
from torchmars.parallel.graphs import compile_blocks
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart, TiedTable
from torchmars.parallel.qk_clip import QKClip
from torchmars.parallel.tensor import cut_layers

if TYPE_CHECKING:
    from torchmars.parallel.pipeline import Pipeline


class ParallelModel:
    """A model whose weights and work the ranks of a layout share. Every rank makes the same calls.

    `whole` is the model without memory, on every rank. Its weights here are not yet initialised.
    """

    def __init__(
        self,
        whole: Model,
        parallelism: ParallelismConfig,
        training: TrainingConfig,
        activations: ActivationCheckpointConfig,
        layout: Layout,
        device: torch.device,
        find_starts: Callable[[Tensor], Tensor] | None = None,
        exact: bool = False,
    ) -> None:
        """Make the parts on `device`.

        `training` has its dtype resolved. `find_starts` is as in `Batches`, `exact` as in
        `Balance`. Raises `UserError` if blocks do not make stages.
        """
        self.whole, self.layout, self.device = whole, layout, device
        self.parallelism, self.alone = parallelism, is_alone(layout, parallelism)
        pipeline, ranks = layout.group("pp"), stage_ranks(parallelism)
        self.sequence, self.tp = SequencePart.on(layout), layout.group("tp").size
        self.batches = Batches(self.sequence, device, pipeline.size > 1, find_starts)
        self.parts: dict[int, ModelPart] = {}
        """This rank's parts, by the number of their stage."""
        for number, blocks in enumerate(blocks_of_stages(whole, parallelism)):
            if ranks[number] == pipeline.rank:
                first, last = number == 0, number == len(ranks) - 1
                part = ModelPart(deepcopy(whole), first, last, layout, training)
                cut_model(part.model, blocks, first, last)
                parallelize(part, layout, parallelism, training, activations)
                self.parts[number] = part.to_empty(device=weight_device(parallelism, device))
                put_buffers(part, device)
        self.balance = Balance(whole, self.parts, training, layout, device, exact)
        ulysses = parallelism.cp_method == "ulysses"
        self.attention_logits = AttentionLogits(whole, self.parts, layout, device, ulysses)
        self.weights: dict[str, nn.Parameter] = {
            name: weight
            for part in self.parts.values()
            for name, weight in part.model.named_parameters()
            if part.first or name != "tok_embed.weight"  # else it is the copy of a tied table
        }
        """The weights of which this rank has a part, by name. They are float32."""
        self.qk_clip: QKClip | None = None
        if limit := training.qk_clip:
            self.qk_clip = QKClip(limit, self.attention_logits, self.parts, self.weights)
        self.copies: Copies | None = None
        """The copies that a single rank computes with, unless it computes in float32."""
        if self.alone and training.dtype != "float32":
            self.copies = Copies(self.parts[0], getattr(torch, training.dtype))
        parts = [part.model for part in self.parts.values()]
        self.buffers = {name: value for part in parts for name, value in part.named_buffers()}
        """What its parts have besides, by name: the biases of routers. No layout cuts them."""
        self.tied: TiedTable | None = None
        self.pipeline: Pipeline | None = None
        if pipeline.size > 1:
            self._join_stages(training, ranks[-1])

    def _join_stages(self, training: TrainingConfig, last: int) -> None:
        """Let this rank's parts work in a pipeline. Rank `last` of it has the last stage."""
        # torch's pipelines take time to import, and most runs have none.
        from torchmars.parallel import pipeline as pipelines

        whole, layout = self.whole, self.layout
        self.pipeline = pipelines.Pipeline(
            self.parts, self.parallelism, training, layout, self.device, whole.width
        )
        if whole.output is None:
            tables = self._table(0), self._table(self.parallelism.stages - 1)
            self.tied = TiedTable(*tables, layout.group("pp"), last)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and buffers: the part of the model that a checkpoint keeps."""
        return {**self.weights, **self.buffers}

    def _table(self, stage: int) -> Tensor | None:
        return self.parts[stage].model.tok_embed.weight if stage in self.parts else None

    def init_weights(self, seed: int, factors: Mapping[str, float] | None = None) -> None:
        """Fill the weights with their initial values, which do not depend on the layout.

        `factors`: see `models.initialize.init_weights`.
        """
        for part in self.parts.values():
            init_weights(part.model, seed, self.weights if self.alone else None, factors)
        self.follow_weights()

    def clip_logits(self, applied: Tensor) -> None:
        """Scale down what made too large logits in a step that was `applied`, a bool, if asked to.

        It ends the change of the weights by a step.
        """
        if self.qk_clip is not None:
            self.qk_clip.scale(applied)

    def follow_weights(self) -> None:
        """Renew everything derived from the weights, after they have changed.

        These are a single rank's copies, and the copy of a tied token table.
        """
        if self.copies is not None:
            self.copies.follow()
        if self.tied is not None:
            self.tied.copy_weights()

    def train(self, mode: bool = True) -> None:
        """Switch dropout on, or off."""
        for part in self.parts.values():
            part.train(mode)

    def backward(
        self,
        batch: Sequence[Tensor],
        enter_phase: Callable[[str], None] = lambda phase: None,
        ahead: bool = False,
    ) -> Tensor:
        """Accumulate the gradient of the mean loss over a global batch; return this rank's mean.

        `batch` are this rank's microbatches of windows, [batch, T + 1] each. The mean is over the
        tokens that this rank computes the loss of, and 0 if it computes none. The gradient has
        those of the z-loss and of the routers' losses too, which the mean is without. `enter_phase`
        is told which phase starts: "forward", "backward", and "reduce", where the rest of the
        gradients' reduction is waited for, or a rank alone casts them; in a pipeline "pipeline",
        all of it. `ahead`: the gradient is exact mode's look-ahead. After any other, and the
        optimizer's step, call `clip_logits`, `follow_weights` and `balance.finish`.
        """
        with self.balance.around(len(batch), ahead), self.attention_logits.around(ahead):
            return self._backward(batch, enter_phase)

    def _backward(self, batch: Sequence[Tensor], enter_phase: Callable[[str], None]) -> Tensor:
        enter_phase("forward" if self.pipeline is None else "pipeline")
        inputs = self.batches.inputs(batch)
        if self.pipeline is not None:
            loss = self.pipeline.backward(*inputs[0])
        else:
            loss = torch.zeros((), device=self.device)
            for number, each in enumerate(inputs, start=1):
                enter_phase("forward")
                if not self.alone:
                    set_reduction(self.parts[0], self.parallelism, last=number == len(inputs))
                # All microbatches are of one size. So the mean of their means is that over all
                # tokens.
                part = self.parts[0](*each) / len(inputs)
                if not self.alone:
                    call_before_reduction_ends(part, partial(enter_phase, "reduce"))
                enter_phase("backward")
                part.backward()
                if self.copies is not None:
                    enter_phase("reduce")
                    self.copies.take_gradients()
                loss += part.detach()
        if self.tied is not None:
            enter_phase("reduce")
            self.tied.add_gradients()
        return loss

    @torch.no_grad()
    def losses(self, windows: Tensor) -> Tensor:
        """Return the loss of the targets in `windows` [batch, T + 1] that this rank computes.

        Float32 [batch, its part of T], or [batch, 0] on a rank without the last stage.
        """
        tokens, targets, starts = self.batches.of(windows)
        losses = self._forward(tokens, targets=targets, starts=starts, wanted="losses")
        return targets.new_empty(len(tokens), 0).float() if losses is None else losses

    @torch.no_grad()
    def scores(self, windows: Tensor) -> Tensor:
        """Return the model's scores of the targets in `windows` [batch, T + 1].

        The log-likelihood of each, and 1 if it is the likeliest token, else 0: float32 [batch, its
        part of T, 2]. A rank without the last stage has zeros.
        """
        tokens, targets, starts = self.batches.of(windows)
        found = self._forward(tokens, targets=targets, starts=starts, wanted="scores")
        return torch.zeros(*targets.shape, 2, device=self.device) if found is None else found

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, vocab_rows] of the next token after `tokens` [batch, length].

        Every rank has them.
        """
        last = tokens.shape[1] - 1
        # Later tokens do not change what earlier ones see.
        unit = sequence_unit(self.sequence.ranks, self.tp)
        tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % unit))
        starts = self.batches.starts(tokens)
        own = self.sequence.of(tokens.to(self.device))
        place = self.sequence.place(last, own.shape[1])
        logits = self._forward(own, starts=starts, at=place or 0)
        group = self.layout.group("sample")
        if group.size == 1:
            assert logits is not None
            return logits
        whole = torch.zeros(len(tokens), self.whole.vocab_rows, device=self.device)
        if logits is not None and place is not None:
            local = logits.to_local() if isinstance(logits, DTensor) else logits
            rank = self.layout.group("tp").rank if isinstance(logits, DTensor) else 0
            whole[:, rank * local.shape[1] : (rank + 1) * local.shape[1]] = local
        dist.all_reduce(whole, group=group.process_group)
        return whole

    def _forward(self, tokens: Tensor, **options: Any) -> Tensor | None:
        if self.pipeline is not None:
            return self.pipeline.forward(tokens, **options)
        result: Tensor = self.parts[0](tokens, **options)
        return result


def parallelize(
    part: ModelPart,
    layout: Layout,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    activations: ActivationCheckpointConfig,
) -> None:
    """Put a part of a plain model on its ranks, in place, from outside: it knows none of it.

    Its experts are dealt out over ep, its layers are cut over tp, its sequences over cp. Its blocks
    keep for the backward pass what `activations` says, compute in float8 and are compiled where
    that is asked for. Its weights are sharded, unless the rank is alone. It computes in
    `training.dtype`, which is resolved; weights stay float32.
    """
    model, alone = part.model, is_alone(layout, parallelism)
    if layout.expert_mesh is not None:
        deal_out_experts(model, layout)
    if layout.group("tp").size > 1:
        cut_layers(model, layout.weight_mesh["tp"])
    if layout.group("cp").size > 1:
        kind = Gathered if parallelism.cp_method == "all-gather" else Exchanged
        model.let_reach(lambda: kind(layout.group("cp").process_group))
    convert_layers(model, training.float8, layout.device)
    checkpoint_blocks(model, activations, layout.expert_mesh is not None)
    if training.compile:
        compile_blocks(model, layout, activations, alone)
    if not alone:
        shard(part, layout, getattr(torch, training.dtype), parallelism)


def put_buffers(part: nn.Module, device: torch.device) -> None:
    """Let the buffers of `part` lie on `device`, where its weights need not be."""
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
