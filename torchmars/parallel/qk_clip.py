"""QK-clip: rows of queries and keys are scaled down where logits of attention were too large.

Source: Kimi Team 2025, arXiv 2507.20534, section 2.1. Heads that share keys are not there: the keys
take the root of what the largest of their heads needs, and the queries of each head the rest.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchmars.models import Model
from torchmars.optim.tensors import local_intervals, local_part
from torchmars.parallel.attention_logits import AttentionLogits
from torchmars.parallel.part import ModelPart


class QKClip:
    """Scales the weights of each head whose largest logit in a step was above `limit`.

    At the weights that the step began with, it would be `limit` then. `logits` are found in each
    step from now on. `parts` are this rank's, and `weights` what it has of each weight, by name.
    """

    def __init__(
        self,
        limit: float,
        logits: AttentionLogits,
        parts: Mapping[int, ModelPart],
        weights: Mapping[str, Tensor],
    ) -> None:
        self.limit, self.logits, logits.always = limit, logits, True
        self.keys = 1
        """Heads of keys in each block."""
        self.rows: list[tuple[int, Tensor, Tensor]] = []
        """Which of the blocks here, a weight in it, and where each of its rows here has its factor
        in a row of `factors`."""
        places = {name: place for place, name in enumerate(logits.blocks)}
        for model in (part.model for part in parts.values()):
            for block, layer, factors in factors_of_rows(model, logits.heads):
                self.keys = max(self.keys, int(factors.max()) - 2 * logits.heads)
                for name in (f"{layer}.weight", f"{layer}.bias"):
                    if name in weights:
                        weight = weights[name]
                        here = factors[slice(*local_intervals(weight)[0])]
                        self.rows.append((places[block], weight, here.to(weight.device)))

    @torch.no_grad()
    def scale(self, applied: Tensor) -> None:
        """Scale what the last step wants scaled, if it was `applied`, a bool.

        Factors of 1 leave the bits as they are. The host does not wait for the device.
        """
        largest = self.logits.result()
        clipped = (largest > self.limit) & largest.isfinite() & applied.to(largest.device)
        factors = self.factors(torch.where(clipped, self.limit / largest, 1.0))
        for block, weight, places in self.rows:
            local = local_part(weight)
            rows = factors[block].to(local.device)[places]
            local.mul_(rows.view(-1, *[1] * (local.ndim - 1)))

    def factors(self, gammas: Tensor) -> Tensor:
        """Return the factors of rows that multiply the logits [blocks, heads] by `gammas`.

        For each block they are 1, those of queries by head, those of queries whose key is every
        head's, and those of keys.
        """
        by_key = gammas.unflatten(1, (self.keys, -1))
        of_keys = by_key.amin(dim=2, keepdim=True).sqrt()
        of_queries = (by_key / of_keys).flatten(1)
        ones = torch.ones_like(gammas[:, :1])
        return torch.cat([ones, of_queries, gammas, of_keys.flatten(1)], dim=1)


def factors_of_rows(model: Model, heads: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the layers of `model` whose rows make queries and keys of its `heads`.

    Of each that is the block's number, the layer's name, and for each of its rows the place of its
    factor among `QKClip.factors`. Attention declares them: its `head_rows` has the rows of each
    piece of a layer's weight, and its `logit_rows` what each piece makes.
    """
    first = {"query": 1, "lone query": 1 + heads, "key": 1 + 2 * heads}
    for number, block in model.blocks.items():
        for path, module in block.named_modules(prefix=f"blocks.{number}"):
            for layer, pieces in getattr(module, "logit_rows", {}).items():
                before, places = Counter[str](), []
                for piece in pieces:
                    places.append(first[piece] + before[piece] if piece else 0)
                    before[piece] += 1
                split = module.head_rows[layer]
                size = len(module.get_submodule(layer).get_parameter("weight"))
                rows = [size // split] * split if isinstance(split, int) else split
                yield (
                    number,
                    f"{path}.{layer}",
                    torch.tensor(places).repeat_interleave(torch.tensor(rows)),
                )
