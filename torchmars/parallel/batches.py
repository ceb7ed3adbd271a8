"""Batches as a rank takes them: its part of every sequence, on its device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmars.core.device import is_gpu
from torchmars.parallel.context import SequencePart

# Of a microbatch: tokens, targets, and where documents begin, if they are kept apart.
Inputs = tuple[Tensor, Tensor, Tensor | None]


class Batches:
    """Moves this rank's part of windows [batch, T + 1] to `device`, on request in advance.

    `find_starts` tells from tokens [batch, T] on the CPU where documents begin, if they are kept
    apart. With `joined`, as pipelines take them, the microbatches of a step are one.
    """

    def __init__(
        self,
        sequence: SequencePart,
        device: torch.device,
        joined: bool,
        find_starts: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.sequence, self.device, self.joined = sequence, device, joined
        self.find_starts = find_starts
        self.copying: torch.Stream | None = None
        """Copies batches to the GPU beside its other work, where they are prefetched."""
        self.prefetched: tuple[Sequence[Tensor], list[Inputs]] = [], []
        """The batch that was prefetched last, and its inputs."""

    def prefetch(self, batch: Sequence[Tensor]) -> None:
        """Begin to copy a batch to the GPU beside its other work; `inputs` returns it later."""
        module = torch.get_device_module(self.device)
        if is_gpu(self.device.type) and self.copying is None:
            self.copying = module.Stream(self.device)
        with module.stream(self.copying):
            self.prefetched = batch, self._inputs(batch)

    def inputs(self, batch: Sequence[Tensor]) -> list[Inputs]:
        """Return the inputs of each microbatch, or of all joined; prefetched if this batch was."""
        prefetched, inputs = self.prefetched
        if prefetched is not batch:
            return self._inputs(batch)
        if self.copying is not None:
            computing = torch.get_device_module(self.device).current_stream(self.device)
            computing.wait_stream(self.copying)
            for each in inputs:
                for tensor in each:
                    if tensor is not None:  # its memory is not free before the step is done
                        tensor.record_stream(computing)
        return inputs

    def _inputs(self, batch: Sequence[Tensor]) -> list[Inputs]:
        return [self.of(*batch)] if self.joined else [self.of(windows) for windows in batch]

    def of(self, *batch: Tensor) -> Inputs:
        """Return the inputs of windows [batch, T + 1], of all in `batch` together."""
        moved = [windows.to(self.device, non_blocking=True) for windows in batch]
        whole = torch.cat(moved) if len(moved) > 1 else moved[0]
        tokens, targets = self.sequence.of(whole[:, :-1]), self.sequence.of(whole[:, 1:])
        return tokens, targets, self.starts(*(windows[:, :-1] for windows in batch))

    def starts(self, *tokens: Tensor) -> Tensor | None:
        """Return where the documents of `tokens` begin; None if they are not kept apart."""
        if self.find_starts is None:
            return None
        starts = self.find_starts(torch.cat(tokens))
        if self.copying is not None:
            starts = starts.pin_memory()  # else the copy would wait for the GPU
        return starts.to(self.device, non_blocking=True)
