"""What a rank has in memory: every tensor of a step, counted from its making to its end."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.13
from torch.utils._pytree import tree_leaves  # private, torch 2.11 to 2.13

# What FSDP2 calls the operations that fill and empty its buffers.
BUFFER_NAMESPACE = "fsdp"


@dataclass
class Effect:
    """What some work does to the memory, in bytes by kind."""

    peak: Counter[str] = field(default_factory=Counter)
    """What there is at the worst moment of the work, beside what there was before."""
    change: Counter[str] = field(default_factory=Counter)
    """What there is after the work, beside what there was before."""

    def changed(self, more: "Effect", less: "Effect") -> "Effect":
        """Return the effect, `more` added and `less` taken away."""
        total = Effect(self.peak.copy(), self.change.copy())
        for effect, count in ((more, Counter.update), (less, Counter.subtract)):
            count(total.peak, effect.peak)
            count(total.change, effect.change)
        return total


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active, fake ones among them.

    `bytes` has them by kind: "activations", or "gathered" for weights and gradients of other ranks'
    shards. `peak` is `bytes` at the moment when all together were most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._peak_total = 0
        self._storages: dict[int, _Storage] = {}

    @property
    def total(self) -> int:
        """The bytes of all tensors that are there now."""
        return self._total

    def know(self, tensors: Iterable[Tensor | None]) -> None:
        """Leave `tensors`, which are there already, out."""
        for storage in storages_of(tensors):
            if (there := self._storages.pop(storage._cdata, None)) is not None:
                self._add(there.kind, -there.size)
            self._storages[storage._cdata] = _Storage(storage, self, "known")

    def settle(self) -> None:
        """Count all that is there now, such as gradients after a backward pass, as gathered."""
        for storage in self._storages.values():
            storage.become("gathered")

    @contextmanager
    def effect(self, leaves: str) -> Iterator["Effect"]:
        """Yield what the body does to the memory: it is known when the body has ended.

        What it makes and leaves is of the kind `leaves`.
        """
        effect, before, there = Effect(), self.bytes.copy(), set(self._storages.values())
        self.peak, self._peak_total = before.copy(), self.total
        yield effect
        for storage in set(self._storages.values()) - there:
            storage.become(leaves)
        for counts, now in ((effect.peak, self.peak), (effect.change, self.bytes)):
            counts.update(now)
            counts.subtract(before)

    def __enter__(self) -> "MemoryCounter":
        # FSDP resizes storages to free them and to take them again.
        resize, counter = torch.UntypedStorage.resize_, self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in counter._storages:
                counter._storages[storage._cdata].measure(storage)
            return result

        # It inherits the method: to delete ours brings that back.
        type.__setattr__(torch.UntypedStorage, "resize_", counted)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        delattr(torch.UntypedStorage, "resize_")
        super().__exit__(*exception)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its parts come here
            return NotImplemented
        if op is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # its fake version makes another tensor
        result = op(*args, **(kwargs or {}))
        if op.namespace == BUFFER_NAMESPACE:
            for storage in storages_of(tree_leaves((args, kwargs, result))):
                self._get(storage).become("gathered")
        else:
            for storage in storages_of(tree_leaves(result)):
                self._get(storage).measure(storage)
        return result

    def _get(self, storage: torch.UntypedStorage) -> "_Storage":
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = _Storage(storage, self, "activations")
        return self._storages[key]

    def _add(self, kind: str, size: int) -> None:
        if kind == "known":
            return
        self.bytes[kind] += size
        self._total += size
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, self.bytes.copy()

    def _forget(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._add(storage.kind, -storage.size)


class _Storage:
    """The memory of one or more tensors, while it is counted."""

    def __init__(self, storage: torch.UntypedStorage, counter: MemoryCounter, kind: str) -> None:
        self.counter, self.kind, self.size = counter, kind, 0
        key = storage._cdata
        self.end = weakref.ref(storage, lambda _: counter._forget(key))
        self.measure(storage)

    def measure(self, storage: torch.UntypedStorage) -> None:
        """Take the size that the memory has now."""
        change, self.size = storage.nbytes() - self.size, storage.nbytes()
        if change:
            self.counter._add(self.kind, change)

    def become(self, kind: str) -> None:
        """Count the memory as another kind, unless it was there from the beginning."""
        if self.kind not in ("known", kind):
            self.counter.bytes[self.kind] -= self.size
            self.counter.bytes[kind] += self.size
            self.kind = kind


def storages_of(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Return where the tensors among `tensors` lie; of DTensors, this rank's parts."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield local.untyped_storage()


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of memory that this rank's parts of `tensors` lie in."""
    sizes = {storage._cdata: storage.nbytes() for storage in storages_of(tensors)}
    return sum(sizes.values())
