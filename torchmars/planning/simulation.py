"""One step of one rank of a run, made without its ranks and without memory.

The model, its sharding and the optimizer are those of the run. The tensors are torch's fake ones,
which have a shape and no values; so are the collectives.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.13
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # private, torch 2.11 to 2.13
from torch.distributed.tensor import DTensor

from torchmars.checkpoint.state import training_state
from torchmars.config import ResolvedConfig
from torchmars.models import build_meta_model
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout
from torchmars.parallel.model import ParallelModel
from torchmars.planning.traffic import TrafficCounter
from torchmars.training.optimizer import build_optimizer

# What FSDPMemTracker calls weights and gradients of other ranks' shards.
GATHERED = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")


@dataclass
class Simulation:
    """What a step takes of one rank. Sizes are in bytes."""

    model: ParallelModel
    optimizer: MARS
    whole_optimizer: MARS
    """The optimizer of the whole model, without memory."""
    traffic: TrafficCounter
    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    """Activations and temporary tensors, at the peak of the forward and backward pass."""
    gathered: int
    """Weights and gradients of other ranks' shards, and their buffers, at that peak."""
    checkpoint: int
    """A whole checkpoint, of all ranks together."""

    @property
    def peak(self) -> int:
        """All memory of the rank at the worst moment of a step.

        The temporary tensors of the optimizer are small beside activations.
        """
        passes = max(self.activations + self.gathered, self.gradients)
        return self.weights + self.optimizer_state + passes


def simulate_step(config: ResolvedConfig, layout: Layout, vocab_size: int) -> Simulation:
    """Make one step of the rank that `layout`, made by `Layout.simulate`, stands for.

    `config` is one with resolved dtypes. Raises `UserError` if it does not fit the layout.
    """
    training = config.training
    microbatch_size, accumulation_steps = training.microbatches(
        layout.data.size, config.parallelism.stages
    )
    whole = build_meta_model(config.model, vocab_size, training.seq_len)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    eager = replace(training, compile=False)
    model = ParallelModel(
        whole,
        config.parallelism,
        eager,
        config.activation_checkpoint,
        layout,
        torch.device("cpu"),
        memory=fake,
    )
    # Not in the fake mode: the ranks compare their plans, which takes values.
    settings = config.optimizer, training.max_grad_norm, whole
    optimizer, whole_optimizer = (
        build_optimizer(*settings, model.weights, layout),
        build_optimizer(*settings),
    )
    optimizer.compile = False
    state = training_state(layout, model.weights, optimizer)
    checkpoint = checkpoint_size(state, layout.world.size)

    [part] = model.parts
    tracker, traffic = FSDPMemTracker(part), TrafficCounter()
    tokens = torch.zeros(microbatch_size, training.seq_len + 1, dtype=torch.int64)
    with fake, traffic:
        with tracker:
            # Else the tracker refuses a second pass.
            part.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            simulate_passes(model, optimizer, tokens, accumulation_steps, traffic)
        gradients = bytes_of(parameter.grad for parameter in model.weights.values())
        traffic.begin("optimizer", weight=1)
        if optimizer.exact:
            optimizer.look_ahead()
        optimizer.step()

    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    gathered = sum(peak[name] for name in GATHERED)
    if accumulation_steps > 1:
        # The whole gradient, in float32, which the tracker takes for temporary tensors.
        gathered += 4 * sum(parameter.numel() for parameter in whole.parameters())
    return Simulation(
        model=model,
        optimizer=optimizer,
        whole_optimizer=whole_optimizer,
        traffic=traffic,
        weights=bytes_of(model.weights.values()),
        gradients=gradients,
        optimizer_state=bytes_of(
            tensor for each in optimizer.state.values() for tensor in each.values()
        )
        + bytes_of(optimizer.ahead.values()),
        activations=peak["Total"] - peak["Sharded Param"] - gathered,
        gathered=gathered,
        checkpoint=checkpoint,
    )


def simulate_passes(
    model: ParallelModel,
    optimizer: MARS,
    tokens: Tensor,
    accumulation_steps: int,
    traffic: TrafficCounter,
) -> None:
    """Make the forward and backward passes of a step of `accumulation_steps` microbatches.

    All microbatches but the last are alike. So two are enough, whatever n is:
    traffic(n) = (n - 1) * traffic(2) - (n - 2) * traffic(1).
    """
    passes = 2 if optimizer.exact else 1
    traffic.begin("forward and backward", weight=passes * (2 - accumulation_steps))
    model.backward([tokens])
    if accumulation_steps > 1:
        optimizer.zero_grad()
        traffic.begin("forward and backward", weight=passes * (accumulation_steps - 1))
        model.backward([tokens] * 2)


def checkpoint_size(state: dict[str, Tensor], world_size: int) -> int:
    """Return the bytes of a checkpoint of `state`, one rank's. Each rank has its own generators."""
    return sum(
        tensor.numel() * tensor.itemsize * (world_size if name.startswith("rng.") else 1)
        for name, tensor in state.items()
    )


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of memory that this rank's parts of `tensors` lie in."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
