"""Keys and values that a model keeps, so that each new token is computed alone."""

import torch
from torch import Tensor

from torchmars.models.attention import CausalAttention
from torchmars.models.documents import Documents, mixed_values
from torchmars.models.model import Model


class Cache:
    """The tokens that a model has seen of a batch of sequences, which end together.

    Shorter sequences are padded on the left. A model with a cache is of no use for training.
    """

    def __init__(self, model: Model, capacity: int) -> None:
        """Let `model` keep the keys and values of `capacity` tokens of each sequence."""
        self.model, self.capacity = model, capacity
        self.seen = 0
        """Tokens of each sequence, padding included."""
        self.padding = torch.zeros(0, dtype=torch.int64)
        """How many tokens of each sequence are padding. On the CPU, as all but what models take."""
        self.padded = False
        """Whether there is any."""
        self.mask: Tensor | None = None
        """What the queries of this pass see, [batch, 1, queries, keys]; None: all keys."""
        for block in model.blocks.values():
            block.set_submodule("attn.attend", CachedAttention(self))

    def start(self, contexts: list[list[int]]) -> Tensor:
        """Forget what was seen, and see `contexts`; return the logits [batch, rows] after each."""
        longest = max(map(len, contexts))
        assert longest <= self.capacity
        self.seen = 0
        missing = [longest - len(context) for context in contexts]
        self.padding, self.padded = torch.tensor(missing), any(missing)
        rows = [[0] * (longest - len(context)) + context for context in contexts]
        return self._see(torch.tensor(rows))

    def go_on(self, tokens: list[int]) -> Tensor:
        """See one more token of each sequence; return the logits [batch, rows] after it."""
        return self._see(torch.tensor(tokens)[:, None])

    @torch.no_grad()
    def _see(self, tokens: Tensor) -> Tensor:
        places = torch.arange(self.seen, self.seen + tokens.shape[1])
        device, mask = self.model.tok_embed.weight.device, self._mask(places)
        self.mask = None if mask is None else mask.to(device)
        # Padding has positions too. Nothing that counts sees it.
        positions = (places - self.padding[:, None]).clamp(min=0)
        hidden = self.model(tokens.to(device), positions.to(device))
        self.seen += tokens.shape[1]
        return self.model.head(hidden[:, -1])

    def _mask(self, places: Tensor) -> Tensor | None:
        if len(places) == 1 and not self.padded:
            return None
        keys = torch.arange(self.seen + len(places))
        earlier = keys <= places[:, None]
        # Padding sees itself: what sees nothing would be NaN.
        real = (keys >= self.padding[:, None, None]) | (keys == places[:, None])
        return (earlier & real)[:, None]


class CachedAttention(CausalAttention):
    """Attends to the keys and values of all tokens that the model has seen."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self.keys = self.values = torch.empty(0)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        assert documents is None and not dropout
        first, last = self.cache.seen, self.cache.seen + k.shape[2]
        if not first:
            shape = *k.shape[:2], self.cache.capacity, k.shape[3]
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, first:last], self.values[:, :, first:last] = k, v
        keys, values = self.keys[:, :, :last], self.values[:, :, :last]
        return mixed_values(q, keys, values, attn_mask=self.cache.mask)
