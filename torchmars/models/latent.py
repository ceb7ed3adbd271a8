"""Multi-head latent attention: keys and values of all heads are made from one latent of a token.

Attention keeps the latent, and a part of the key that has a position and that all heads share: what
a cache holds and what ranks exchange is as narrow. Source: DeepSeek-AI 2024 (arXiv 2405.04434),
section 2.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.config.deepseek import DeepseekArgs
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.moe import as_it_is
from torchmars.models.rotary import rotate

EPS = 1e-6  # of the norms of latents, whatever the other norms have


def as_they_are(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return what is made of hidden states: `LatentAttention.gather` on one rank."""
    return parts


class LatentAttention(nn.Module):
    """Causal self-attention by latents of queries, if `q_lora_rank` is not 0, and of keys."""

    def __init__(self, args: DeepseekArgs) -> None:
        super().__init__()
        self.nope, self.rope = args.qk_nope_head_dim, args.qk_rope_head_dim
        self.kept, self.neighbours = args.kv_lora_rank, args.rope_interleave
        latent, q_width = args.q_lora_rank, args.n_head * args.head_width
        self.q_a = nn.Linear(args.n_embd, latent, bias=False) if latent else None
        self.q_a_norm = nn.RMSNorm(latent, EPS) if latent else None
        self.q_b = nn.Linear(latent, q_width, bias=False) if latent else None
        self.q = None if latent else nn.Linear(args.n_embd, q_width, bias=False)
        self.kv_a = nn.Linear(args.n_embd, self.kept + self.rope, bias=False)
        self.kv_a_norm = nn.RMSNorm(self.kept, EPS)
        self.kv_b = Expansion(args.n_head * (self.nope + args.v_head_dim), self.kept)
        self.proj = nn.Linear(args.n_head * args.v_head_dim, args.n_embd, bias=False)
        self.attend = LatentMixing(self.nope, args.v_head_dim, args.attention_scale)
        sizes, heads = (self.nope, self.rope), args.n_head
        queries, keys = "q_b" if latent else "q", (self.nope, args.v_head_dim)
        self.head_rows = {queries: sizes * heads, "kv_b": keys * heads}
        self.head_rows["kv_a"] = self.kept, self.rope
        self.logit_rows = {queries: ["query", "lone query"] * heads, "kv_b": ["key", ""] * heads}
        self.gather = as_they_are
        """Makes parts of the sequences whole. Tensor parallelism replaces it: all before it is
        computed for a rank's own part, all after it for its own heads."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        latent, turned = self.kv_a(x).split([self.kept, self.rope], dim=-1)
        if self.q_a is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a(x))
        x, latent, turned = self.gather(x, self.kv_a_norm(latent), turned)
        to_queries = self.q if self.q_b is None else self.q_b
        assert to_queries is not None
        q = to_queries(x).unflatten(-1, (-1, self.nope + self.rope)).transpose(1, 2)
        rotated = rotate(q[..., self.nope :], cos, sin, self.neighbours)
        q = torch.cat([q[..., : self.nope], rotated], dim=-1)
        k = rotate(turned.unsqueeze(1), cos, sin, self.neighbours)
        weight = self.kv_b.local(self.kv_b.weight)
        y = self.attend(q, k, latent.unsqueeze(1), sight, weight=weight)
        projected: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return projected


class Expansion(nn.Module):
    """The weight that makes keys and values of latents, [heads * (key and value), latent].

    No nn.Linear: what computes with it may take some heads of it only, or the other side.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.local = as_it_is
        self.weight = nn.Parameter(torch.empty(rows, width))


class LatentMixing(CausalAttention):
    """Attention whose keys and values are one head: the part of keys with positions, and latents.

    So those reach it, whatever the `reach` is, and `mix` makes each head's own of them.
    """

    def __init__(self, nope: int, width: int, scale: float) -> None:
        """`nope` is the width of a key's part without positions, `width` that of a value."""
        super().__init__(scale)
        self.nope, self.width = nope, width

    def mix(  # type: ignore[override]  # it needs a weight
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Sight | None,
        dropout: float,
        weight: Tensor,
        first: int = 0,
    ) -> Tensor:
        """Return the mixed values of queries of some heads: `first` and those after it.

        `k` is [batch, 1, keys, width of the part], `v` [batch, 1, keys, width of a latent]; the
        `weight` is that of `kv_b`, of all heads that this rank has.
        """
        heads = q.shape[1]
        own = weight.unflatten(0, (-1, self.nope + self.width))[first : first + heads]
        if q.shape[2] == 1 < k.shape[2]:
            return self.mix_absorbed(q, k, v, sight, own)
        made = F.linear(v.squeeze(1), own.flatten(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys, values = made.split([self.nope, self.width], dim=-1)
        keys = torch.cat([keys, k.expand(-1, heads, -1, -1)], dim=-1)
        return super().mix(q, keys, values, sight, dropout)

    def mix_absorbed(
        self, q: Tensor, k: Tensor, v: Tensor, sight: Sight | None, own: Tensor
    ) -> Tensor:
        """Return the same for the last token alone, without making keys and values of all tokens.

        Its queries are made such as latents are the keys of, and latents are mixed.
        """
        of_keys, of_values = own.split([self.nope, self.width], dim=1)
        q = torch.cat([q[..., : self.nope] @ of_keys, q[..., self.nope :]], dim=-1)
        mixed = super().mix(q, torch.cat([v, k], dim=-1), v, sight, 0.0)
        return mixed @ of_values.mT
