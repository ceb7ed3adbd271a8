"""Steps of an optimizer with gradients that are given, on whole tensors and on shards."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from tests.optim.reference import gradients
from torchmars.optim import MARS
from torchmars.optim.matrices import shapes
from torchmars.optim.rules import RULES

MATRICES = [(12, 20), (20, 12), (7, 7), (1, 5)]
OTHERS = [(64,), (3, 5, 7), ()]  # which rules of single elements take too
# Over 4 ranks: uneven and empty shards, fewer rows than ranks.
SHARDED = [(10, 6), (7, 12), (2, 5), (1, 4), (5, 6, 3), (8, 8), (8, 8)]
BASE = {"lr": 6e-3, "weight_decay": 0.1}
MARS_RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m")


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return how far a tensor is from another one, as a part of that one's norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def starts(sizes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a random tensor of each size, rounded from float64."""
    return [
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            dtype
        )
        for seed, size in enumerate(sizes)
    ]


def run(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    sequences: Sequence[Sequence[Tensor]],
) -> None:
    """Take a step with each of the gradients, zeroing in place between them as many loops do."""
    for step in range(len(sequences[0])):
        for parameter, sequence in zip(parameters, sequences):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(sequence[step])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def meant(rule: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of `settings` that a rule has, or any rule. `MARS` warns of the others."""
    own = RULES[rule].variance_reduced
    return {name: each for name, each in settings.items() if own or name not in ("clip", "gamma")}


def train(
    rule: str,
    dtype: torch.dtype = torch.float32,
    steps: int = 20,
    before: Callable[[MARS, int], None] | None = None,
    sizes: Sequence[Sequence[int]] = MATRICES,
    **settings: Any,
) -> tuple[list[nn.Parameter], MARS]:
    """Return parameters of `sizes` after `steps` steps, and the optimizer.

    `before` is called before each step. Matrices are orthogonalised in the parameters' dtype.
    """
    parameters = [nn.Parameter(start) for start in starts(sizes, dtype)]
    optimizer = MARS(parameters, rule=rule, matrix_dtype=dtype, **BASE | meant(rule, settings))
    sequences = [gradients(size, steps, seed, dtype) for seed, size in enumerate(sizes)]
    for step in range(steps):
        if before:
            before(optimizer, step)
        for parameter, sequence in zip(parameters, sequences):
            parameter.grad = sequence[step].clone()
        optimizer.step()
    return parameters, optimizer


def whole(values: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of tensors of which each rank may have a shard."""
    gathered = (value.full_tensor() if isinstance(value, DTensor) else value for value in values)
    return [value.detach().clone() for value in gathered]


def laid_out(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of a whole gradient, laid out as `parameter` is, without communication."""
    if not isinstance(parameter, DTensor):
        return whole.clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    block = shapes.intervals(parameter.shape, mesh.shape, placements, mesh.get_coordinate())
    local = whole[tuple(slice(*interval) for interval in block)].contiguous()
    like = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **like)


def sharded(
    mesh: DeviceMesh, placements: Sequence[Placement], sizes: Sequence[Sequence[int]] = SHARDED
) -> list[nn.Parameter]:
    """Return parameters of `sizes` on a mesh. What has one dim is sharded along that."""
    return [
        nn.Parameter(
            distribute_tensor(
                start,
                mesh,
                [Shard(0) if each == Shard(1) and start.ndim == 1 else each for each in placements],
                src_data_rank=None,
            )
        )
        for start in starts(sizes)
    ]


def take_steps(
    parameters: Sequence[nn.Parameter], rule: str, number: int = 6, **settings: Any
) -> MARS:
    """Take `number` of six steps with gradients that are laid out as the parameters are."""
    optimizer = MARS(parameters, rule=rule, weight_decay=0.1, **meant(rule, settings))
    sequences = [gradients(tuple(each.shape), 6, seed) for seed, each in enumerate(parameters)]
    for step in range(number):
        for parameter, sequence in zip(parameters, sequences):
            parameter.grad = laid_out(sequence[step], parameter)
        optimizer.step()
    return optimizer
