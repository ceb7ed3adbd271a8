"""Copies a run's tensors to the host's memory, to be written while training changes them."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Private, torch 2.11 to 2.15: in 2.11 the public DefaultStager works once only.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from torchmars.core.device import is_gpu


class Staging:
    """Copies tensors to the host's memory, and keeps that to be filled again.

    Those of a GPU are copied on a stream of its own, beside the next forward and backward pass:
    neither changes weights or state. Whoever is about to change them calls `before_change`.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = is_gpu(device.type)
        self.device_module = torch.get_device_module(device)
        self.stager = StateDictStager(pin_memory=self.on_gpu)
        self.copied: torch.Event | None = None
        """When the device has made the copies that it was told to make last."""

    @functools.cached_property
    def stream(self) -> torch.Stream:
        """The stream on which the copies are made."""
        return self.device_module.Stream()

    def copy(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return copies of `tensors`, and a function that waits until they are complete."""
        if not self.on_gpu:
            return self.stager.stage(tensors), lambda: None
        # Memory of a few bytes is not pinned: the host waits for such a copy, and so for those
        # before it on the stream. They come first.
        order = sorted(tensors, key=lambda name: tensors[name].nbytes)
        with self._beside_training() as copied:
            copies = self.stager.stage({name: tensors[name] for name in order}, non_blocking=True)
        return {name: copies[name] for name in tensors}, copied.synchronize

    def fill(self, copies: dict[str, Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
        """Copy `tensors` to `copies` in the host's memory; return a function that waits for it."""
        if not self.on_gpu:
            for name, tensor in tensors.items():
                copies[name].copy_(tensor)
            return lambda: None
        with self._beside_training() as copied:
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)
        return copied.synchronize

    @contextlib.contextmanager
    def _beside_training(self) -> Iterator[torch.Event]:
        """Let the device do the body on a stream of its own. The event is when it has done so."""
        self.stream.wait_stream(self.device_module.current_stream())
        self.copied = copied = self.device_module.Event(blocking=True)
        with self.device_module.stream(self.stream):
            yield copied
            copied.record()

    def before_change(self) -> None:
        """Let later work of the device wait until the copies are made.

        The host does not wait.
        """
        if self.copied is not None:
            self.device_module.current_stream().wait_event(self.copied)
            self.copied = None
