"""Causal attention: the one place where a token's hidden state depends on those of other tokens."""

from torch import Tensor, nn

from torchmars.models.documents import Documents, mixed_values


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each token to itself and to earlier ones.

    It has no weights. It is a module of its own so that context parallelism can replace it.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Return the mixed values [batch, heads, length, head width].

        `q` is [batch, heads, length, head width]; `k` and `v` may have fewer heads, each for
        several of `q` (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245). With
        `documents`, tokens attend inside their own only.
        """
        if documents is not None:
            return documents.attend(q, k, v, dropout)
        return mixed_values(q, k, v, dropout, is_causal=True)
