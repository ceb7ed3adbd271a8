"""The forward and backward passes of a step of one rank, as few of them as tell the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.13

from torchmars.config import TrainingConfig
from torchmars.models import Model
from torchmars.optim.tensors import local_part
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.parallel.part import TiedTable
from torchmars.parallel.pipeline import Pipeline
from torchmars.planning.memory import Effect, MemoryCounter, bytes_of, grown
from torchmars.planning.pipeline import ActionKind, Effects, actions_of_ranks
from torchmars.planning.traffic import TrafficCounter

PHASE = "forward and backward"
# Blocks at either end of a stage beside which there is more in memory, or less, than beside others:
# the next one is gathered ahead, the last gradients are still on their way.
EDGE = 2


@dataclass
class Passes:
    """The memory and traffic of one rank's forward and backward passes in a step."""

    traffic: TrafficCounter
    effects: Effects
    """Their effects on its memory. Without a pipeline one effect covers all of them."""
    gradients: int
    """Bytes of gradients that they leave."""

    def grown(self, more: "Passes", blocks: Sequence[int]) -> "Passes":
        """Return the passes of a rank that has, in each of its parts, so many `blocks` more.

        `more` are the passes of a rank that has one more.
        """
        traffic, times = TrafficCounter(), sum(blocks) / len(blocks)
        traffic.times = grown(self.traffic.times, more.traffic.times, times)
        traffic.sent = grown(self.traffic.sent, more.traffic.sent, times)
        traffic.waited = grown(self.traffic.waited, more.traffic.waited, times)
        effects = {
            key: effect.grown(more.effects[key], blocks[key[0]])
            for key, effect in self.effects.items()
        }
        gradients = self.gradients + round(times * (more.gradients - self.gradients))
        return Passes(traffic, effects, gradients)


def make_passes(
    model: ParallelModel, training: TrainingConfig, rounds: Sequence[int], fake: FakeTensorMode
) -> Passes:
    """Make the passes of a step on `model`, whose weights `fake` has made.

    `rounds` are the microbatches of each round, at whose end gradients are reduced.
    """
    size, _ = training.microbatches(model.layout.data.size, model.parallelism.stages)
    tokens = torch.zeros(size, training.seq_len + 1, dtype=torch.int64)
    memory, traffic = MemoryCounter(), TrafficCounter()
    memory.know(each for part in model.parts.values() for each in part.parameters())
    memory.know(model.weights.values())
    for part in model.parts.values():
        name_blocks(part.model, memory)
    with fake, traffic, memory:
        if model.pipeline is None:
            with memory.effect(leaves="gathered") as effect:
                simulate_passes(model, tokens, rounds, memory, traffic)
            effects: Effects = {(0, "B", -1): effect}
        else:
            with model.balance.around(rounds[0], ahead=True):
                effects = simulate_stages(model, tokens, len(rounds), memory, traffic)
        # Which experts tokens chose is added up once in a step, whatever its passes are, and so is
        # how large logits are.
        traffic.begin(PHASE, weight=1)
        with model.balance.around(1, ahead=False), model.attention_logits.around(ahead=False):
            pass
    gradients = bytes_of(parameter.grad for parameter in model.weights.values())
    return Passes(traffic, effects, gradients)


def name_blocks(model: Model, memory: MemoryCounter) -> None:
    """Let `memory` know which block computes, of those that tell the rest: see `EDGE`."""
    blocks, first = [*model.blocks.values()], EDGE + unlike_blocks(model)
    for place, block in enumerate(blocks):
        after = place - len(blocks)
        name = place if place < first else after if after >= -EDGE else "between"
        block.register_forward_pre_hook(lambda *_, name=name: memory.begin(("forward", name)))
        block.register_forward_hook(
            lambda _, __, output, name=name: (
                output.register_hook(lambda _: memory.begin(("backward", name))) and None
            )
        )


def unlike_blocks(model: Model) -> int:
    """Return after how many blocks all are alike."""
    shapes = [
        [(name, each.shape) for name, each in block.named_parameters()]
        for block in model.blocks.values()
    ]
    return next((place for place, each in enumerate(shapes) if each == shapes[-1]), 0)


def simulate_passes(
    model: ParallelModel,
    tokens: Tensor,
    rounds: Sequence[int],
    memory: MemoryCounter,
    traffic: TrafficCounter,
) -> None:
    """Make the passes of a step of `rounds` of microbatches, each of windows `tokens`.

    All microbatches of a round but the last are alike. So two are enough, whatever n is:
    traffic(n) = (n - 1) * traffic(2) - (n - 2) * traffic(1).
    """
    [part] = model.parts.values()
    # Before the second microbatch there is the gradient of the first one.
    part.register_forward_pre_hook(lambda *_: memory.settle(), prepend=True)
    traffic.begin(PHASE, weight=sum(2 - microbatches for microbatches in rounds))
    # "Ahead" counts no choices of experts: `make_passes` does, once for a step.
    model.backward([tokens], ahead=True)
    if max(rounds) > 1:
        for weight in model.weights.values():
            weight.grad = None
        traffic.begin(PHASE, weight=sum(microbatches - 1 for microbatches in rounds))
        model.backward([tokens] * 2, ahead=True)


def simulate_stages(
    model: ParallelModel,
    tokens: Tensor,
    passes: int,
    memory: MemoryCounter,
    traffic: TrafficCounter,
) -> Effects:
    """Make passes of this rank's stages, with microbatches of windows `tokens`.

    Return the effect of each on the memory. The first microbatch, the last one and one for all
    between them are enough. Nothing comes from other stages: inputs and gradients are made here.
    """
    pipeline = model.pipeline
    assert pipeline is not None
    actions = [each for rank in actions_of_ranks(pipeline.schedule) for each in rank]
    split = any(action.kind == "I" for action in actions)
    stages = [
        SimulatedStage(model, pipeline, number, tokens, memory, traffic)
        for number in pipeline.torch_stages
    ]
    effects: dict[tuple[int, ActionKind, int], Effect] = {}
    times = {0: passes, 1: passes * (pipeline.microbatches - 2), -1: passes}
    for place, stage in enumerate(stages):
        for which, weight in times.items():
            traffic.begin(PHASE, weight)
            effects[place, "F", which] = stage.forward()
        if split:
            traffic.begin(PHASE, weight=0)
            stage.forward()
    for place, stage in enumerate(stages):
        for which, weight in times.items():
            traffic.begin(PHASE, weight)
            effects[place, "B", which] = stage.backward(last=which == -1)
            if split and which == 1:
                traffic.begin(PHASE, weight=0)
                effects[place, "I", 1] = stage.backward_of_inputs()
                effects[place, "W", 1] = stage.backward_of_weights()
        for which in (0, -1) if split else ():
            own, others = effects[place, "B", which], effects[place, "B", 1]
            effects[place, "W", which] = effects[place, "W", 1].changed(own, others)
    if model.tied is not None:
        exchange_table(model.tied, passes, traffic)
    return effects


def exchange_table(tied: TiedTable, passes: int, traffic: TrafficCounter) -> None:
    """Count the traffic of `TiedTable` in a step. A simulated rank has nobody to send it to."""
    if tied.original is None and tied.copy is not None:
        traffic.begin(PHASE, passes)
        traffic.count("send", local_part(tied.copy).nbytes, tied.ranks.process_group)
    if tied.copy is None and tied.original is not None:
        traffic.begin("optimizer", weight=1)
        traffic.count("send", local_part(tied.original).nbytes, tied.ranks.process_group)
    if tied.copy is not None:
        tied.copy.grad = None


class SimulatedStage:
    """A stage of a pipeline that runs alone. Its passes return their effects on the memory."""

    def __init__(
        self,
        model: ParallelModel,
        pipeline: Pipeline,
        number: int,
        windows: Tensor,
        memory: MemoryCounter,
        traffic: TrafficCounter,
    ) -> None:
        self.stage, self.part = pipeline.torch_stages[number], model.parts[number]
        self.hidden, self.group = pipeline.hidden, pipeline.ranks.process_group
        ranks = [None, *pipeline.rank_of, None]
        self.receives, self.sends = (
            rank not in (None, pipeline.ranks.rank) for rank in (ranks[number], ranks[number + 2])
        )
        self.memory, self.traffic = memory, traffic
        self.tokens, self.targets, self.starts = model.batches.of(windows)
        self.in_flight: list[dict[str, Any]] = []
        """The inputs of torch's stage for the backward passes of microbatches, oldest first."""
        self.halfway: list[dict[str, Any]] = []
        """The same for the gradients of weights, of microbatches whose inputs have theirs."""

    def forward(self) -> Effect:
        """Pass a microbatch through the stage."""
        x = self.tokens if self.part.first else self._hidden()
        taken: dict[str, Any] = {"input_values": [x], "output_grads": None}
        with self.memory.effect(leaves="activations") as effect:
            output = self.part(x, targets=self.targets, starts=self.starts)
            taken["stage_output"] = output if self.part.last else (output,)
            del output
        if not self.part.last:
            taken["output_grads"] = (self._hidden(),)
        self.in_flight.append(taken)
        self._send(self.sends)
        return effect

    def backward(self, last: bool) -> Effect:
        """Make the backward pass of the oldest microbatch; of the `last` one, reduce gradients."""
        with self.memory.effect(leaves="gathered") as effect:
            self.stage.backward_maybe_with_nosync("full", self.in_flight.pop(0), last)
            if last:
                self.stage.perform_reduce_grad(1)
        self._send(self.receives)
        return effect

    def backward_of_inputs(self) -> Effect:
        """Make the oldest microbatch's gradients of inputs. The first stage has none to make."""
        taken = self.in_flight.pop(0)
        with self.memory.effect(leaves="activations") as effect:
            if not self.part.first:
                if self.part.last:
                    taken["stage_output"] = (taken["stage_output"],)
                _, groups = self.stage.backward_maybe_with_nosync("input", taken)
                taken = {"param_groups": groups}
        self.halfway.append(taken)
        return effect

    def backward_of_weights(self) -> Effect:
        """Make the gradients of weights of the microbatch that `backward_of_inputs` began."""
        kind = "full" if self.part.first else "weight"
        with self.memory.effect(leaves="gathered") as effect:
            self.stage.backward_maybe_with_nosync(kind, self.halfway.pop(0))
        return effect

    def _hidden(self) -> Tensor:
        """Return a hidden state, or its gradient. Its memory is a receiving buffer."""
        hidden = torch.empty(self.hidden.shape, dtype=self.hidden.dtype, requires_grad=True)
        self.memory.know([hidden])
        return hidden

    def _send(self, elsewhere: bool) -> None:
        if elsewhere:
            self.traffic.count("send", self.hidden.nbytes, self.group)
