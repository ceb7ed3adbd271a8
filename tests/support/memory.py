"""The memory of some work: every tensor that it makes, counted from its making to its end."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active, fake ones among them."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._known = set()

    def know(self, tensors):
        """Leave `tensors`, which are there already, out."""
        self._known |= {each.untyped_storage()._cdata for each in tensors}

    def _add(self, size):
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _end(self, key, size):
        self._known.discard(key)
        self._add(-size)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.softmax.int_out and args[0].dtype != result.dtype:
            # It makes a copy of its input in that dtype, on all devices.
            self._add(result.nbytes)
            self._add(-result.nbytes)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self._add(size)
                    weakref.finalize(storage, self._end, key, size)
        return result
