"""One step of one rank of a run, made without its ranks and without memory.

The model, its sharding and the optimizer are the run's own. The tensors are torch's fake ones,
which have a shape and no values; so are the collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.13

from torchmars.checkpoint.state_dict import training_state
from torchmars.config import ParallelismConfig, ResolvedConfig
from torchmars.config.compile import resolve_compile
from torchmars.config.float8 import Float8Config
from torchmars.core.device import is_gpu
from torchmars.models import Model, build_run_model
from torchmars.models.attention import has_kernel
from torchmars.models.moe import Experts
from torchmars.optim import MARS
from torchmars.parallel.experts import Dispatch
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.planning.memory import bytes_of
from torchmars.planning.passes import EDGE, Passes, make_passes, unlike_blocks
from torchmars.planning.pipeline import Action, Effects, actions_of_ranks, peak_of
from torchmars.planning.traffic import TrafficCounter
from torchmars.training.optimizer import MovingAverage, build_optimizer


@dataclass
class Simulation:
    """The memory and traffic of one rank in a step. Sizes are in bytes."""

    model: ParallelModel
    optimizer: MARS
    traffic: TrafficCounter
    weights: int
    """And of their moving average, if the run keeps one."""
    gradients: int
    optimizer_state: int
    received: int
    """Buffers for hidden states from other stages of a pipeline, which it keeps."""
    checkpoint: int
    """This rank's part of a checkpoint, without its generators."""
    generators: int
    """Its random number generators, in a checkpoint."""
    activations: int = 0
    """Activations and temporary tensors, at the peak of the forward and backward pass."""
    gathered: int = 0
    """Weights and gradients of other ranks' shards, and their buffers, at that peak. On a rank
    alone: the copies of weights that it computes with."""
    effects: Effects = field(default_factory=dict)
    """In a pipeline: the effects of its passes on its memory. Its stages are numbered from 0."""

    @property
    def peak(self) -> int:
        """All memory of the rank at the worst moment of a step.

        The temporary tensors of the optimizer are small beside activations.
        """
        working = max(self.activations + self.gathered, self.gradients)
        return self.weights + self.optimizer_state + self.received + working


def simulate_ranks(config: ResolvedConfig, layout: Layout, whole: Model) -> list[Simulation]:
    """Make one step of each rank of a pipeline, or of the only one, at the place of `layout`.

    `layout` is made by `Layout.simulate`, and `config` has resolved dtypes. Ranks whose stages are
    alike are made once. Raises `UserError` if the config does not fit the layout.
    """
    own, known = layout.group("pp"), dict[object, Simulation]()
    few = FewBlocks(config, whole)
    simulations = []
    for rank in range(own.size):
        place = replace(layout, groups=layout.groups | {"pp": replace(own, rank=rank)})
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = fake_model(config, config.parallelism, whole, place, fake)
        alike = tuple(
            (part.first, part.last, len(part.model.blocks)) for part in model.parts.values()
        )
        if alike not in known:
            known[alike] = simulate_step(config, place, model, fake, few)
        simulations.append(with_peak(known[alike], model))
    return simulations


def fake_model(
    config: ResolvedConfig,
    parallelism: ParallelismConfig,
    whole: Model,
    place: Layout,
    fake: FakeTensorMode,
) -> ParallelModel:
    """Return the parts of `whole` of the rank at `place`, with weights that `fake` makes."""
    tp, dtype = place.group("tp").size, getattr(torch, config.training.dtype)
    compiles = bool(resolve_compile(config, place.device, True, tp, None).training.compile)
    masked = config.data.separate_documents and not has_kernel(
        place.device.type, dtype, whole.dropout
    )
    model = ParallelModel(
        whole,
        parallelism,
        replace(config.training, compile=False, float8=Float8Config()),
        config.activation_checkpoint,
        place,
        torch.device("cpu"),
        memory=fake,
        # Where documents begin does not change a mask's size.
        find_starts=(lambda ids: torch.zeros(len(ids), 1, dtype=torch.int32)) if masked else None,
    )
    for part in model.parts.values():
        part.compile_loss = compiles
        if is_gpu(place.device.type):  # windows and context parallelism have no mask in memory
            for attend in part.model.attention():
                attend.masks = False
    route_evenly(model)
    return model


def with_peak(simulation: Simulation, model: ParallelModel) -> Simulation:
    """Return the simulation of a rank like `model`'s with the peak of that rank's own passes."""
    if model.pipeline is None:
        return simulation
    places = {stage: place for place, stage in enumerate(model.parts)}
    actions = [
        Action(kind, places[stage], microbatch)
        for kind, stage, microbatch in actions_of_ranks(model.pipeline.schedule)[
            model.pipeline.ranks.rank
        ]
    ]
    peak = peak_of(actions, simulation.effects)
    return replace(
        simulation, model=model, activations=peak["activations"], gathered=peak["gathered"]
    )


class FewBlocks:
    """Passes of ranks whose stages have fewer blocks, of which those of longer stages follow.

    Blocks are alike, so each one more adds the same to the traffic and, at each moment of a pass,
    to the memory.
    """

    def __init__(self, config: ResolvedConfig, whole: Model) -> None:
        self.config, self.whole = config, whole
        self.least = 2 * EDGE + unlike_blocks(whole)
        """Blocks of a stage, of which no two are at the same distance from its ends."""
        self.known: dict[object, Passes] = {}

    def tell(self, model: ParallelModel) -> bool:
        """Return whether they tell the costs of `model`'s passes, and are fewer than its own."""
        counts = [len(part.model.blocks) for part in model.parts.values()]
        # On CPUs small models are one unit of FSDP, and large ones are not.
        alike = is_gpu(model.layout.device.type)
        # Where some are gathered together, one more block changes the last unit.
        alike &= all(part.blocks_of_unit == 1 for part in model.parts.values())
        return alike and min(counts) > self.least + 1

    def passes(self, model: ParallelModel, rounds: Sequence[int]) -> Passes:
        """Return the passes of `model`, as `make_passes` does."""
        counts = [len(part.model.blocks) for part in model.parts.values()]
        few, more = (self.of(model, self.least + added, rounds) for added in (0, 1))
        return few.grown(more, [count - self.least for count in counts])

    def of(self, model: ParallelModel, blocks: int, rounds: Sequence[int]) -> Passes:
        """Return the passes of a rank like that of `model`, whose stages have so many `blocks`."""
        ends = tuple((part.first, part.last) for part in model.parts.values())
        if (ends, blocks) not in self.known:
            parallelism, stages = model.parallelism, model.parallelism.stages
            if parallelism.pp > 1:
                parallelism = replace(parallelism, pp_blocks=(blocks,) * stages)
            shape: dict[str, Any] = {"n_layer": blocks * stages}
            smaller = replace(self.config.model, **shape)
            whole = build_run_model(replace(self.config, model=smaller), self.whole.vocab_rows)
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            small = fake_model(self.config, parallelism, whole, model.layout, fake)
            self.known[ends, blocks] = make_passes(small, self.config.training, rounds, fake)
        return self.known[ends, blocks]


def simulate_step(
    config: ResolvedConfig,
    layout: Layout,
    model: ParallelModel,
    fake: FakeTensorMode,
    few: FewBlocks,
) -> Simulation:
    """Make one step of the rank that has `model`, whose weights `fake` has made."""
    training = config.training
    # Not in the fake mode: the ranks compare their plans, which takes values.
    optimizer = build_optimizer(config, model.whole, model.weights, layout)
    # Fake tensors have no numbers to decide by.
    optimizer.compile, optimizer.plans.conditional = False, True
    average: dict[str, Tensor] = {}
    if training.ema_decay:
        with fake:
            average = MovingAverage(model.weights, training.ema_decay).values
    state = training_state(layout, model, optimizer, average)
    _, every = training.microbatches(layout.data.size, model.parallelism.stages)
    rounds = [every] * config.optimizer.passes  # exact mode has a look-ahead
    if few.tell(model):
        passes = few.passes(model, rounds)
    else:
        passes = make_passes(model, training, rounds, fake)
    with fake:
        for weight in model.weights.values():
            weight.grad = torch.empty_like(weight)
        with passes.traffic as traffic:
            traffic.begin("optimizer", weight=1)
            if optimizer.exact:
                optimizer.look_ahead()
            optimizer.step()
    peak = passes.effects[0, "B", -1].peak
    weights: list[Tensor] = [each for part in model.parts.values() for each in part.parameters()]
    copies = 0
    if model.copies is not None:
        weights, copies = model.copies.weights, bytes_of(weights)
    return Simulation(
        model=model,
        optimizer=optimizer,
        traffic=traffic,
        weights=bytes_of(weights) + bytes_of(average.values()),
        gradients=passes.gradients,
        optimizer_state=bytes_of(
            tensor for each in optimizer.state.values() for tensor in each.values()
        )
        + bytes_of(optimizer.ahead.values()),
        received=received(model),
        checkpoint=whole_bytes(state, generators=False),
        generators=whole_bytes(state, generators=True),
        activations=peak["activations"],
        gathered=peak["gathered"] + copies,
        effects=passes.effects,
    )


def route_evenly(model: ParallelModel) -> None:
    """Let as many rows travel to each rank of experts: fake tensors have no choices."""
    for part in model.parts.values():
        for mixture in part.model.routed().values():
            if isinstance(mixture.dispatch, Dispatch):
                mixture.dispatch = EvenDispatch(mixture.dispatch.group)


class EvenDispatch(Dispatch):
    """Sends as many rows to each rank, and gets as many from each."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        self.rows = len(rows)
        return super().__call__(experts, rows, counts)

    def splits(self, leaving: Tensor, arriving: Tensor) -> list[list[int]]:
        """Return even numbers of rows; where they do not divide, the first ranks get one more."""
        each, more = divmod(self.rows, self.ranks)
        shares = [each + (rank < more) for rank in range(self.ranks)]
        return [shares, [shares[dist.get_rank(self.group)]] * self.ranks]


def received(model: ParallelModel) -> int:
    """Return the bytes of the buffers that torch's stages keep, one for each microbatch.

    They are for the hidden states of the stage before and for the gradients of the one after.
    """
    pipeline = model.pipeline
    if pipeline is None:
        return 0
    ends = sum((not part.first) + (not part.last) for part in model.parts.values())
    return ends * pipeline.microbatches * pipeline.hidden.nbytes


def whole_bytes(state: dict[str, Tensor], *, generators: bool) -> int:
    """Return the bytes of the whole tensors of `state`, or of its generators."""
    return sum(
        tensor.numel() * tensor.itemsize
        for name, tensor in state.items()
        if name.startswith("rng.") == generators
    )
