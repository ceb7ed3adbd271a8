"""What a rank sends: every collective of a step, counted as it is called."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # private, torch 2.11 to 2.15
    _resolve_process_group,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15

# What a rank sends, as a part of the whole tensor, by the best known algorithms, rings:
# Thakur et al. 2005.
SENT_PARTS: dict[str, Callable[[int], float]] = {
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "send": lambda ranks: 1,
}
# The operations of torch.ops.c10d, torch 2.11 to 2.15, and which argument is the whole tensor.
OPERATIONS = {
    "allgather_base": ("all-gather", 0),
    "reduce_scatter_base": ("reduce-scatter", 1),
    "allreduce": ("all-reduce", 0),
    "send": ("send", 0),
}
# Those of torch.ops._c10d_functional, of DTensors and of context parallelism. Their first argument
# is what a rank gives: of an all-gather, its part.
FUNCTIONAL_OPERATIONS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
NO_TRAFFIC = ("recv", "wait_tensor", "wrap_tensor_autograd")  # a send counts where it starts


@dataclass(frozen=True)
class TrafficKind:
    """A kind of traffic: the phase of a step, the operation, and the ranks that take part."""

    phase: str
    operation: str
    ranks: tuple[int, ...]


class TrafficCounter(TorchDispatchMode):
    """Counts the collectives of this rank while it is active, each with the current weight."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.weight = "", 1
        self.times: Counter[TrafficKind] = Counter()
        """How often the rank takes part in a kind of traffic."""
        self.sent: Counter[TrafficKind] = Counter()
        """The bytes that it sends of that kind."""
        self.waited: Counter[TrafficKind] = Counter()
        """Those that layers wait for. FSDP and pipelines send while the rank computes."""

    def begin(self, phase: str, weight: int) -> None:
        """Count what comes under `phase`, each collective `weight` times."""
        self.phase, self.weight = phase, weight

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its parts come here
            return NotImplemented
        name = op._schema.name.split("::")[-1].strip("_")
        if op.namespace == "c10d" and name not in NO_TRAFFIC:
            self._count_call(name, args)
        if op.namespace == "_c10d_functional" and name not in NO_TRAFFIC:
            self._count_functional(FUNCTIONAL_OPERATIONS[name], args)
        return op(*args, **(kwargs or {}))

    def count(
        self, operation: str, size: int, group: dist.ProcessGroup, waited: bool = False
    ) -> None:
        """Count an operation on whole tensors of `size` bytes in `group`."""
        self._add(operation, size * SENT_PARTS[operation](group.size()), group, waited)

    def _count_call(self, name: str, args: Any) -> None:
        group = next(
            dist.ProcessGroup.unbox(each)
            for each in args
            if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
        )
        if name == "alltoall_base":
            self._add("all-to-all", sent_to_others(args[1], args[4], group), group)
        else:
            operation, place = OPERATIONS[name]
            whole = args[place] if isinstance(args[place], list) else [args[place]]
            self.count(operation, sum(tensor.nbytes for tensor in whole), group)

    def _count_functional(self, operation: str, args: Any) -> None:
        group = _resolve_process_group(args[-1])
        if operation == "all-to-all":
            self._add(operation, sent_to_others(args[0], args[2], group), group, waited=True)
        else:
            parts = group.size() if operation == "all-gather" else 1
            self.count(operation, args[0].nbytes * parts, group, waited=True)

    def _add(
        self, operation: str, sent: float, group: dist.ProcessGroup, waited: bool = False
    ) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = TrafficKind(self.phase, operation, ranks)
        self.times[kind] += self.weight
        self.sent[kind] += self.weight * round(sent)
        self.waited[kind] += self.weight * round(sent) * waited


def sent_to_others(tensor: Tensor, pieces: list[int], group: dist.ProcessGroup) -> float:
    """Return the bytes of an all-to-all that leave this rank.

    `pieces` are the elements for each receiver; empty: all alike.
    """
    if not pieces:
        return tensor.nbytes * (1 - 1 / group.size())
    return tensor.nbytes * (1 - pieces[group.rank()] / max(sum(pieces), 1))
