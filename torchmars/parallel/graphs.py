"""The compiled parts of a model: its blocks, each by itself or some in one graph."""

import math
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchmars.config import ActivationCheckpointConfig
from torchmars.models import Model
from torchmars.models.attention import Sight
from torchmars.parallel.layout import Layout

# Blocks of a graph at most, by the type of the device, on a rank alone: between calls of compiled
# code the host checks what it may call, in 0.1 ms for each block and pass. GPT-2 small is one graph
# so, and Llama 1B. All graphs of a deeper model are alike, so that their number costs no time to
# compile. On CPUs runs keep the bits that they had: one graph rounds less often.
MOST_BLOCKS = defaultdict(lambda: 16, cpu=1)
RECOMPILE_LIMIT = 64  # graphs of one function


def compile_blocks(
    model: Model, layout: Layout, activations: ActivationCheckpointConfig, alone: bool
) -> None:
    """Let the blocks of `model` be compiled, in place.

    On a rank `alone` up to `MOST_BLOCKS` are one graph. Between those of others FSDP has to act.
    With activation checkpointing a graph is a block: blocks must not be recomputed all at once.
    """
    # Blocks of several kinds, each watched or not, in training or not, are more graphs of one
    # function than torch allows by default. It would go on without compiling.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    most = MOST_BLOCKS[layout.device.type]
    if alone and most > 1 and activations.mode == "none":
        compile_together(model, most)
        return
    # Rows that travel to experts are as many as a router decides: no graph goes on past them.
    apart = model.routed() if layout.expert_mesh is not None else {}
    for number, block in model.blocks.items():
        for module in block.children() if number in apart else [block]:
            if module is not apart.get(number):
                module.compile()


def compile_together(model: Model, most: int) -> None:
    """Compile `model.transform` in as few graphs as have at most `most` blocks each, in place.

    They pass on what the stages of a pipeline do.
    """
    names = [*model.blocks]
    count = math.ceil(len(names) / most)
    cuts = [round(len(names) * place / count) for place in range(count + 1)]
    parts = [part_of(model, names[begin:end]) for begin, end in zip(cuts, cuts[1:])]
    graphs = [torch.compile(part.transform) for part in parts]

    def transform(x: Tensor, positions: Tensor, sight: Sight | None) -> Tensor:
        for part, graph in zip(parts, graphs, strict=True):
            part.training = model.training
            x = graph(x, positions, sight)
        return x

    model.transform = transform  # type: ignore[method-assign]


def part_of(model: Model, names: list[str]) -> Model:
    """Return `model` with some of its blocks only, the same modules."""
    part = copy(model)
    part._modules = model._modules | {"blocks": SomeBlocks(model, names)}
    return part


class SomeBlocks(nn.ModuleDict):
    """Some blocks of a model, under their names.

    Compiled code asks for the names where a model does only: it holds for other blocks then.
    """

    def __init__(self, model: Model, names: list[str]) -> None:
        super().__init__({str(place): model.blocks[name] for place, name in enumerate(names)})
        self.names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def keys(self) -> Any:
        """Return the names."""
        return self.names

    def items(self) -> Any:
        """Return names and blocks."""
        return zip(self.names, self.values(), strict=True)

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(str(self.names.index(name)))
