"""Keeps experts equally busy, without knowing the layout.

The balance loss of a step takes each expert's share of the choices from the *last* step's global
batch: exact integers that all ranks know before the step begins, whatever its microbatches, stages
and recomputations are. Given the shares it is a mean over tokens, as the cross-entropy is. Shares
of the global batch: Qiu et al. 2025, arXiv 2501.11873; biases: Wang et al. 2024, arXiv 2408.15664.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.config import TrainingConfig
from torchmars.models import Model
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart


class Balance:
    """Counts the choices of this rank's routers, and sets the losses and biases that balance them.

    `whole` is the model, and `parts` are this rank's parts of it. `exact`: a batch has two
    gradients, as in exact mode, a look-ahead's and then a step's. Every rank makes the same calls.
    Without experts nothing is done.
    """

    def __init__(
        self,
        whole: Model,
        parts: Mapping[int, ModelPart],
        training: TrainingConfig,
        layout: Layout,
        device: torch.device,
        exact: bool = False,
    ) -> None:
        self.training, self.layout, self.exact = training, layout, exact
        of_model = whole.routed()
        self.places = [int(name) for name in of_model]
        """The blocks of the whole model that have experts, by number."""
        self.layers = {
            name: layer for part in parts.values() for name, layer in part.model.routed().items()
        }
        """The experts of this rank, by the number of their block."""
        experts = max((len(layer.router.weight) for layer in of_model.values()), default=0)
        size = len(self.layers), experts
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        """Tokens that chose each expert in the last step: [layers, experts]. 0: no step yet."""
        self.before = torch.zeros_like(self.counts)
        """The same of the step before that, or the value of `counts` then."""
        self.found = torch.zeros_like(self.counts)
        """The same of the step under way: first of this rank, then of all."""
        self.work: dist.Work | None = None
        """The work that adds them up."""
        self.counted = False
        """Whether the pass under way is counted."""
        for part in parts.values():
            # Not where activation checkpointing calls blocks again.
            part.register_forward_pre_hook(partial(self._count, True))
            part.register_forward_hook(partial(self._count, False), always_call=True)

    def _count(self, begins: bool, *_: object) -> None:
        """Let the layers count in a forward pass that begins, and not after its end."""
        for layer, found in zip(self.layers.values(), self.found, strict=True):
            layer.counted = found if begins and self.counted else None

    @contextlib.contextmanager
    def around(self, microbatches: int, ahead: bool) -> Iterator[None]:
        """Set up the routers for the forward and backward passes over a global batch.

        `microbatches` are this rank's. `ahead`: it is the look-ahead of exact mode, which is not
        counted. It and the step that the batch belongs to take the same shares: those that are
        known when it is made. Otherwise the correction would have the change of the shares.
        """
        if not self.layers:
            yield
            return
        self._wait()  # for counts of a step that was never finished
        used = self.before if self.exact and not ahead else self.counts
        self._set_losses(used, parts=microbatches * self.layout.group("tp").size)
        self.found.zero_()
        self.counted = not ahead
        try:
            yield
        finally:
            self.counted = False
            for layer in self.layers.values():
                layer.router.pressure = None
        if not ahead:
            group = self.layout.group("stage").process_group
            self.work = dist.all_reduce(self.found, group=group, async_op=True)

    def _set_losses(self, counts: Tensor, parts: int) -> None:
        """Set the routers' losses by `counts`. A rank's mean over tokens is one of `parts` of it.

        Gradients are averaged over all ranks except along tp, where ranks have parts of a sum.
        """
        loss, z_loss = self.training.balance_loss, self.training.router_z_loss
        if not loss and not z_loss:
            return
        # Without counts shares are even, and the loss has no gradient: as if they were 0.
        shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)
        pressures = (loss * counts.shape[1] / parts * shares).float()
        for layer, pressure in zip(self.layers.values(), pressures, strict=True):
            layer.router.pressure, layer.router.z_loss = pressure, z_loss / parts

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    @torch.no_grad()
    def finish(self, applied: Tensor) -> None:
        """End a step: if it was `applied`, a bool, its counts are those of the last step now.

        They move the biases that balance routers. The host does not wait for the device.
        """
        if not self.layers:
            return
        self._wait()
        applied = applied.to(self.found.device, non_blocking=True)
        self.before.copy_(self.counts)
        self.counts.copy_(self.found.where(applied, self.counts))
        biases = [layer.router.bias for layer in self.layers.values()]
        if all(bias is None for bias in biases):
            return
        missing = self.found.sum(dim=1, keepdim=True) - self.found * self.found.shape[1]
        moves = self.training.balance_rate * missing.sign().float()
        moves = (moves - moves.mean(dim=1, keepdim=True)) * applied
        for bias, move in zip(biases, moves, strict=True):
            if bias is not None:
                bias.add_(move.to(bias.device))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's counts that the next step needs, by names in a checkpoint.

        All ranks of a stage have the same. Loading writes into the tensors.
        """
        kept = {"counts": self.counts} | ({"counts_before": self.before} if self.exact else {})
        return {
            f"balance.{name}.{key}": counts
            for key, of_layers in kept.items()
            for name, counts in zip(self.layers, of_layers, strict=True)
        }

    def figures(self) -> dict[str, float]:
        """Return how evenly the last step's tokens chose the experts of all layers.

        "experts/busiest": load of the busiest expert over the mean. "experts/entropy": entropy of
        the loads over that of equal loads, averaged over layers. "experts/without_tokens": experts
        that no token chose. Empty without experts or before the first step. Collective in a
        pipeline. Waits for the device once.
        """
        if not self.places:
            return {}
        rows = torch.zeros(max(self.places) + 1, 3, dtype=torch.float64, device=self.counts.device)
        if self.layers:
            experts = self.counts.shape[1]
            shares = self.counts.double() / self.counts.sum(dim=1, keepdim=True).clamp(min=1)
            entropy = torch.special.entr(shares).sum(dim=1) / (math.log(experts) or 1)
            unused = (self.counts == 0).sum(dim=1)
            found = torch.stack([shares.amax(dim=1) * experts, entropy, unused], dim=1)
            for name, row in zip(self.layers, found, strict=True):
                rows[int(name)] = row
        stages = self.layout.group("pp")
        if stages.size > 1:
            dist.all_reduce(rows, group=stages.process_group)
        values = rows.tolist()
        busiest, entropies, without = zip(*(values[place] for place in self.places), strict=True)
        if not max(busiest):
            return {}
        return {
            "experts/busiest": max(busiest),
            "experts/entropy": sum(entropies) / len(entropies),
            "experts/without_tokens": sum(without),
        }
