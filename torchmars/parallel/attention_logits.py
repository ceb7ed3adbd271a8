"""The largest logits of attention in a step, by block and head, on any layout."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.models import Model
from torchmars.models.attention import CausalAttention
from torchmars.parallel.layout import Layout
from torchmars.parallel.part import ModelPart


class AttentionLogits:
    """Lets the attention of this rank's parts say how large its logits get, and asks all ranks.

    `whole` is the model, and `parts` are this rank's parts of it. With `ulysses` the ranks of cp
    share heads. Every rank makes the same calls. The largest of all does not depend on the order in
    which it is found, nor on how often: recomputed blocks change nothing.
    """

    def __init__(
        self,
        whole: Model,
        parts: Mapping[int, ModelPart],
        layout: Layout,
        device: torch.device,
        ulysses: bool,
    ) -> None:
        self.layout, self.device = layout, device
        self.measures = False
        """Whether the next step is measured for `figures`."""
        self.always = False
        """Whether each step is measured."""
        self.places = [int(name) for name in whole.blocks]
        """The blocks of the whole model, by number."""
        self.blocks = {
            name: [each for each in block.modules() if isinstance(each, CausalAttention)]
            for part in parts.values()
            for name, block in part.model.blocks.items()
        }
        """The attention of this rank's blocks, by the number of the block."""
        self.heads, tp, cp = whole.heads[0], layout.group("tp"), layout.group("cp")
        sharing = cp.size if ulysses else 1
        own = self.heads // (tp.size * sharing)
        first = own * (tp.rank * sharing + cp.rank % sharing)
        self.own = slice(first, first + own)
        """The heads that mix on this rank."""
        self.found: list[Tensor] | None = None
        """Those of each block here, in the pass under way; None: nobody asks."""
        self.largest: Tensor | None = None
        """The largest logits of the last step on all ranks [blocks here, heads], if measured."""
        self.work: dist.Work | None = None
        """The work that finds them."""
        for part in parts.values():
            # Not where activation checkpointing calls blocks again.
            part.register_forward_pre_hook(partial(self._watch, True))
            part.register_forward_hook(partial(self._watch, False), always_call=True)

    def _watch(self, begins: bool, *_: object) -> None:
        """Let attention note its logits in a forward pass that begins, and not after its end."""
        for attends, found in zip(self.blocks.values(), self.found or ()):
            for attend in attends:
                attend.watched = found if begins else None

    @contextlib.contextmanager
    def around(self, ahead: bool) -> Iterator[None]:
        """Find the largest logits of the passes over a global batch, if somebody wants them.

        Not of a look-ahead of exact mode.
        """
        self._wait()  # for those of a step that was never finished
        self.largest = None
        if ahead or not (self.measures or self.always):
            yield
            return
        # Each block has memory of its own: compiled code need not ask whether it is shared.
        lowest = partial(torch.full, fill_value=-torch.inf, device=self.device)
        self.found = [lowest((self.own.stop - self.own.start,)) for _ in self.blocks]
        try:
            yield
            found = self.found
        finally:
            self.found = None
        self.largest = lowest((len(self.blocks), self.heads))
        if found:
            # Whether MAX keeps a NaN is up to the backend.
            every = torch.stack(found)
            self.largest[:, self.own] = every.masked_fill_(every.isnan(), torch.inf)
        group = self.layout.group("stage").process_group
        self.work = dist.all_reduce(self.largest, dist.ReduceOp.MAX, group=group, async_op=True)

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def result(self) -> Tensor:
        """Return the largest logits of the last step [blocks here, heads], the same on all ranks
        that have a part of these blocks."""
        self._wait()
        assert self.largest is not None
        return self.largest

    def figures(self) -> dict[str, float]:
        """Return the largest logit of the last step, of each block and of all.

        Empty where it was not to be measured for them. Blocks with an attention of their own are
        left out. Collective in a pipeline. Waits for the device once.
        """
        if self.largest is None or not self.measures:
            return {}
        rows = torch.full((max(self.places) + 1,), -torch.inf, device=self.device)
        for name, row in zip(self.blocks, self.result().unbind(), strict=True):
            rows[int(name)] = row.amax()
        stages = self.layout.group("pp")
        if stages.size > 1:
            dist.all_reduce(rows, dist.ReduceOp.MAX, group=stages.process_group)
        values = rows.tolist()
        found = {place: values[place] for place in self.places if values[place] > -torch.inf}
        name = "attention/largest_logit"
        of_blocks = {f"{name}/{place}": value for place, value in found.items()}
        return {name: max(found.values())} | of_blocks if found else {}
