"""One step of one rank of a run, made without its ranks and without memory.

The model, its sharding and the optimizer are those of the run. The tensors are torch's fake ones,
which have a shape and no values; so are the collectives.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.13

from torchmars.checkpoint.state_dict import training_state
from torchmars.config import ResolvedConfig
from torchmars.config.compile import resolve_compile
from torchmars.config.float8 import Float8Config
from torchmars.models import Model
from torchmars.models.documents import has_kernel
from torchmars.models.moe import Experts, MoE
from torchmars.optim import MARS
from torchmars.parallel.context import GatheredAttention
from torchmars.parallel.experts import Dispatch
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.planning.memory import MemoryCounter, bytes_of
from torchmars.planning.passes import PHASE, simulate_passes, simulate_stages
from torchmars.planning.pipeline import Action, Effects, actions_of_ranks, peak_of
from torchmars.planning.traffic import TrafficCounter
from torchmars.training.ema import MovingAverage
from torchmars.training.optimizer import build_optimizer


@dataclass
class Simulation:
    """What a step takes of one rank. Sizes are in bytes."""

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
    """Weights and gradients of other ranks' shards, and their buffers, at that peak."""
    effects: Effects = field(default_factory=dict)
    """In a pipeline: what its passes do to its memory. Its stages are numbered from 0."""

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
    tp = layout.group("tp").size
    compiles = bool(resolve_compile(config, layout.device, True, tp, None).training.compile)
    dtype = getattr(torch, config.training.dtype)
    masked = config.data.separate_documents and not has_kernel(
        layout.device.type, dtype, whole.dropout
    )
    simulations = []
    for rank in range(own.size):
        groups = layout.groups | {"pp": replace(own, rank=rank)}
        place = replace(layout, groups=groups)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        eager = replace(config.training, compile=False, float8=Float8Config())
        model = ParallelModel(
            whole,
            config.parallelism,
            eager,
            config.activation_checkpoint,
            place,
            torch.device("cpu"),
            memory=fake,
            find_starts=one_document if masked else None,
        )
        for part in model.parts.values():
            part.compile_loss = compiles
        every = config.activation_checkpoint.every
        alike = tuple(
            (part.first, part.last, tuple(int(number) % every for number in part.model.blocks))
            for part in model.parts.values()
        )
        if alike not in known:
            known[alike] = simulate_step(config, place, model, fake)
        simulations.append(with_peak(known[alike], model))
    return simulations


def one_document(tokens: Tensor) -> Tensor:
    """Return one start for each sequence: where documents begin does not change a mask's size."""
    return torch.zeros(len(tokens), 1, dtype=torch.int32)


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


def simulate_step(
    config: ResolvedConfig, layout: Layout, model: ParallelModel, fake: FakeTensorMode
) -> Simulation:
    """Make one step of the rank that has `model`, whose weights `fake` has made."""
    training = config.training
    microbatches = training.microbatches(layout.data.size, config.parallelism.stages)
    # Not in the fake mode: the ranks compare their plans, which takes values.
    optimizer = build_optimizer(config, model.whole, model.weights, layout)
    # Fake tensors have no numbers to decide by.
    optimizer.compile = optimizer.sees_verdict = False
    average: dict[str, Tensor] = {}
    if training.ema_decay:
        with fake:
            average = MovingAverage(model.weights, training.ema_decay).values
    state = training_state(layout, model, optimizer, average)
    passes = 2 if optimizer.exact else 1

    if layout.device.type == "cuda":
        leave_out_masks(model)
    route_evenly(model)
    memory, traffic = MemoryCounter(), TrafficCounter()
    parameters = [each for part in model.parts.values() for each in part.parameters()]
    memory.know(parameters)
    effects: Effects = {}
    tokens = torch.zeros(microbatches[0], training.seq_len + 1, dtype=torch.int64)
    with fake, traffic:
        with memory:
            if model.pipeline is None:
                simulate_passes(model, tokens, microbatches[1], passes, memory, traffic)
            else:
                with model.balance.around(microbatches[1], ahead=True):
                    effects = simulate_stages(model, tokens, passes, memory, traffic)
            count_choices(model, traffic)
        gradients = bytes_of(parameter.grad for parameter in model.weights.values())
        traffic.begin("optimizer", weight=1)
        if optimizer.exact:
            optimizer.look_ahead()
        optimizer.step()
    return Simulation(
        model=model,
        optimizer=optimizer,
        traffic=traffic,
        weights=bytes_of(parameters) + bytes_of(average.values()),
        gradients=gradients,
        optimizer_state=bytes_of(
            tensor for each in optimizer.state.values() for tensor in each.values()
        )
        + bytes_of(optimizer.ahead.last_grads.values()),
        received=received(model),
        checkpoint=whole_bytes(state, generators=False),
        generators=whole_bytes(state, generators=True),
        activations=memory.peak["activations"],
        gathered=memory.peak["gathered"],
        effects=effects,
    )


def count_choices(model: ParallelModel, traffic: TrafficCounter) -> None:
    """Add up which experts tokens chose, as a step does once, whatever its passes are."""
    traffic.begin(PHASE, weight=1)
    with model.balance.around(microbatches=1, ahead=False):
        pass


def leave_out_masks(model: ParallelModel) -> None:
    """Let attention under context parallelism take no mask: on GPUs it has none in memory."""
    for part in model.parts.values():
        for module in part.modules():
            if isinstance(module, GatheredAttention):
                module.make_mask = lambda queries, keys: None


def route_evenly(model: ParallelModel) -> None:
    """Let as many rows travel to each rank of experts: fake tensors have no choices."""
    for part in model.parts.values():
        for module in part.modules():
            if isinstance(module, MoE) and isinstance(module.dispatch, Dispatch):
                module.dispatch = EvenDispatch(module.dispatch.group)


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
    """Return the bytes of the whole tensors of `state`, or those of its generators."""
    return sum(
        tensor.numel() * tensor.itemsize
        for name, tensor in state.items()
        if name.startswith("rng.") == generators
    )
