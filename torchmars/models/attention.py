"""Causal attention: the one place where a token's hidden state depends on those of other tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each token to itself and to earlier ones.

    It has no weights. It is a module of its own so that context parallelism can replace it.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Return the mixed values [batch, heads, length, head width].

        `q` is [batch, heads, length, head width]; `k` and `v` may have fewer heads, each for
        several of `q` (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245). `mask`
        [batch, 1, length, length] says which token attends to which; None: to all earlier ones.
        """
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            # Repeated keys and values would cost memory, and took 8% longer on a CPU.
            enable_gqa=k.shape[1] != q.shape[1],
        )


def document_mask(documents: Tensor) -> Tensor:
    """Return which token attends to which, [batch, 1, length, length]: earlier, same document.

    `documents` [batch, length] has the number of each token's document.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones_like(same).tril()
