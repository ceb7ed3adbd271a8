"""Keys and values that a model keeps, so that each new token is computed alone."""

import torch
from torch import Tensor

from torchmars.models.attention import Mix, Sight
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
        model.let_reach(lambda: Kept(self))

    def start(self, contexts: list[list[int]]) -> Tensor:
        """Forget all tokens, and see `contexts`; return the logits [batch, rows] after each."""
        longest = max(map(len, contexts))
        assert longest <= self.capacity
        self.seen = 0
        self.padding = torch.tensor([longest - len(context) for context in contexts])
        rows = [[0] * (longest - len(context)) + context for context in contexts]
        return self._see(torch.tensor(rows))

    def go_on(self, tokens: list[int]) -> Tensor:
        """See one more token of each sequence; return the logits [batch, rows] after it."""
        return self._see(torch.tensor(tokens)[:, None])

    @torch.no_grad()
    def _see(self, tokens: Tensor) -> Tensor:
        places = torch.arange(self.seen, self.seen + tokens.shape[1])
        model, device = self.model, self.model.tok_embed.weight.device
        sight = Sight.after_padding(self.padding, places, device)
        # Padding has positions too. Nothing that counts sees it.
        positions = (places - self.padding[:, None]).clamp(min=0).to(device)
        x = model.transform(model.embed(tokens.to(device), positions), positions, sight)
        self.seen += tokens.shape[1]
        return model.head(model.norm(x)[:, -1])


class Kept:
    """Lets queries see the keys and values of all tokens that the model has seen."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.keys = self.values = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mix: Mix) -> Tensor:
        """Keep `k` and `v`, and mix all that is kept."""
        first, last = self.cache.seen, self.cache.seen + k.shape[2]
        if not first:
            self.keys, self.values = (
                part.new_empty(*part.shape[:2], self.cache.capacity, part.shape[3])
                for part in (k, v)
            )
        self.keys[:, :, first:last], self.values[:, :, first:last] = k, v
        return mix(q, self.keys[:, :, :last], self.values[:, :, :last])
