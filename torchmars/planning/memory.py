"""The memory of a rank: every tensor of a step, counted from its making to its end."""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import (  # private, torch 2.11 to 2.13
    ShardingPropagator,
)
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.13
from torch.utils._pytree import tree_leaves  # private, torch 2.11 to 2.13

# FSDP2's name for the operations that fill and empty its buffers.
BUFFER_NAMESPACE = "fsdp"
# The function that DTensors call to try an operation.
TRIAL = "_propagate_tensor_meta_non_cached"
T = TypeVar("T")


@dataclass
class Effect:
    """The effect of some work on the memory, in bytes by kind."""

    moments: dict[Hashable, Counter[str]] = field(default_factory=dict)
    """Peak bytes of each phase above the level before the work."""
    change: Counter[str] = field(default_factory=Counter)
    """Bytes that stay after the work, above the level before it."""

    @property
    def peak(self) -> Counter[str]:
        """Bytes at the worst moment of the work, above the level before it."""
        return max(self.moments.values(), key=Counter.total)

    def changed(self, more: "Effect", less: "Effect") -> "Effect":
        """Return the effect, `more` added and `less` taken away."""
        peak, change = self.peak.copy(), self.change.copy()
        for effect, count in ((more, Counter.update), (less, Counter.subtract)):
            count(peak, effect.peak)
            count(change, effect.change)
        return Effect({"": peak}, change)

    def grown(self, more: "Effect", times: int) -> "Effect":
        """Return the effect with `times` the difference to `more` added, in each part of the work.

        What only `more` has lies between parts of both: its growth is between theirs.
        """
        moments = {
            moment: grown(peak, more.moments[moment], times)
            for moment, peak in self.moments.items()
        }
        return Effect(moments, grown(self.change, more.change, times))


def grown(few: Counter[T], more: Counter[T], times: float) -> Counter[T]:
    """Return `few` with `times` the difference to `more` added."""
    return Counter(
        {key: round(few[key] + times * (more[key] - few[key])) for key in {**few, **more}}
    )


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active, fake ones among them.

    `bytes` has them by kind: "activations", or "gathered" for weights and gradients of other ranks'
    shards. `moments` has, for each part of the work that `begin` named, `bytes` at the moment when
    all together were most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._total = 0
        self.counting = True
        self._storages: dict[int, _Storage] = {}
        self._restart()

    def _restart(self) -> None:
        self.moments: dict[Hashable, Counter[str]] = {}
        self.begin("")

    def begin(self, moment: Hashable) -> None:
        """Name the part of the work that begins. One name may stand for several parts."""
        self.moment, there = moment, self.moments.get(moment, Counter())
        self._peak_total = there.total()
        self._note()

    def _note(self) -> None:
        if self._total > self._peak_total or self.moment not in self.moments:
            self._peak_total, self.moments[self.moment] = self._total, self.bytes.copy()

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
        """Yield the body's effect on the memory: it is known when the body has ended.

        Memory that it makes and leaves is of the kind `leaves`.
        """
        effect, before, there = Effect(), self.bytes.copy(), set(self._storages.values())
        self._restart()
        yield effect
        effect.moments = self.moments
        for storage in set(self._storages.values()) - there:
            storage.become(leaves)
        effect.change = self.bytes.copy()
        for counts in (*effect.moments.values(), effect.change):
            counts.subtract(before)

    def __enter__(self) -> "MemoryCounter":
        # FSDP resizes storages to free them and to take them again.
        resize, counter = torch.UntypedStorage.resize_, self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in counter._storages:
                counter._storages[storage._cdata].measure(storage)
            return result

        def uncounted(*arguments: Any) -> Any:
            before, counter.counting = counter.counting, False
            try:
                return propagate(*arguments)
            finally:
                counter.counting = before

        # It inherits the method: to delete ours brings that back.
        type.__setattr__(torch.UntypedStorage, "resize_", counted)
        # DTensors try an operation on whole tensors, fake ones, where they first meet it.
        propagate = self._propagate = getattr(ShardingPropagator, TRIAL)
        setattr(ShardingPropagator, TRIAL, uncounted)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        delattr(torch.UntypedStorage, "resize_")
        setattr(ShardingPropagator, TRIAL, self._propagate)
        super().__exit__(*exception)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its parts come here
            return NotImplemented
        if op is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # its fake version makes another tensor
        result = op(*args, **(kwargs or {}))
        if not self.counting:
            return result
        if op is torch.ops.aten.softmax.int_out and args[0].dtype != result.dtype:
            # It makes a copy of its input in that dtype, on all devices.
            self._add("activations", result.nbytes)
            self._add("activations", -result.nbytes)
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
        self._note()

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
