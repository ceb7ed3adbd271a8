"""The Llama family: Llama 3 and, by options, Mistral, SmolLM3, OLMo 3, Qwen, Mixtral and GLM-4.5.

- RMS norms, SwiGLU MLPs and grouped queries. No biases, except `qkv_bias` (Qwen2, GLM-4.5).
- Rotary positions, in float32; GLM-4.5 rotates only half of each head (`rotary_fraction`).
- `rope_scaling_factor` stretches wavelengths, as in Llama 3.1 or by YaRN.
- Blocks without rotary positions (`rope_blocks`, SmolLM3), or with a window of attention (Mistral).
- `qk_norm` normalises each head's queries and keys (Qwen3), or those of all heads at once and
  what blocks add instead of what they take (OLMo 3).
- The head is a weight of its own or, if `tied`, the token table.
- Experts (moe.py) replace the MLP in all blocks after the first `n_dense`.

Sources: Touvron et al. 2023 (arXiv 2302.13971) for the architecture; Grattafiori et al. 2024 (arXiv
2407.21783) for Llama 3; Yang et al. 2024 and 2025 (arXiv 2407.10671, 2505.09388) for Qwen2 and
Qwen3; Jiang et al. 2023 and 2024 (arXiv 2310.06825, 2401.04088) for Mistral and Mixtral; GLM-4.5
Team 2025 (arXiv 2508.06471).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.config.llama import LlamaArgs
from torchmars.config.model_args import DecoderArgs, Multipliers
from torchmars.core.words import counted
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.model import Head, Model, Table, TensorParallelCut, added
from torchmars.models.moe import MoE, as_it_is
from torchmars.models.rotary import rotate, rotation, unscaled


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, args: LlamaArgs, number: int) -> None:
        super().__init__()
        self.head_width, self.rotates = args.head_width, args.rope_letter(number) != "n"
        q_width, kv_width = args.n_head * args.head_width, args.n_kv_head * args.head_width
        self.q = nn.Linear(args.n_embd, q_width, bias=args.qkv_bias)
        self.k = nn.Linear(args.n_embd, kv_width, bias=args.qkv_bias)
        self.v = nn.Linear(args.n_embd, kv_width, bias=args.qkv_bias)
        self.whole_norm = args.qk_norm_whole
        self.q_norm = make_qk_norm(args, q_width)
        self.k_norm = make_qk_norm(args, kv_width)
        self.proj = nn.Linear(q_width, args.n_embd, bias=False)
        self.attend = CausalAttention(args.multipliers.attention_scale(self.head_width))
        self.head_rows = {"q": args.n_head, "k": args.n_kv_head, "v": args.n_kv_head}
        self.logit_rows = {"q": ["query"] * args.n_head, "k": ["key"] * args.n_kv_head}
        self.logit_bound = "model.qk_norm" if args.qk_norm else ""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.whole_norm:
            q, k = self.normalised(q, k)
        # By the width of a head: a rank may have some of the heads only.
        q, k, v = (part.unflatten(-1, (-1, self.head_width)) for part in (q, k, v))
        if not self.whole_norm:
            q, k = self.normalised(q, k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.attend(q, k, v, sight)
        projected: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return projected

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys after their norms, if there are some."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class WholeNorm(nn.RMSNorm):
    """RMSNorm over the width of all heads, of which a rank may have some."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.local = as_it_is
        self.mean: Callable[[Tensor], Tensor] = partial(torch.mean, dim=-1, keepdim=True)
        """Takes means over all heads. Tensor parallelism replaces it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (self.mean(wide.square()) + (self.eps or 0.0)).rsqrt()
        return (wide * scale * self.local(self.weight)).to(x.dtype)


def make_qk_norm(args: LlamaArgs, width: int) -> nn.RMSNorm | None:
    """Return the norm of queries or keys, whose heads together have `width`; None for none."""
    if not args.qk_norm:
        return None
    if args.qk_norm_whole:
        return WholeNorm(width, args.norm_eps)
    return nn.RMSNorm(args.head_width, args.norm_eps)


class MLP(nn.Module):
    """SwiGLU: two layers side by side, the SiLU of one times the other, and a third (Shazeer 2020,
    arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.proj(F.silu(self.gate(x)) * self.up(x))
        return projected


def make_mlp(args: DecoderArgs, number: int) -> MLP | MoE:
    """Return the second half of block `number`: an MLP, or experts."""
    if not args.n_expert or number < args.n_dense:
        return MLP(args.n_embd, args.n_inner)
    inner, shared = args.expert_width, args.n_expert_shared
    return MoE(
        args.n_embd,
        args.n_expert,
        args.n_expert_used,
        inner,
        args.norm_topk_prob,
        args.router == "sigmoid",
        args.routed_scaling,
        MLP(args.n_embd, shared * inner) if shared else None,
        args.groups,
    )


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, args: DecoderArgs, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.residual = args.multipliers.residual
        self.attn_norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        self.attn = attn
        self.mlp_norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        x = added(x, self.attn(self.attn_norm(x), cos, sin, sight), self.residual)
        return added(x, self.mlp(self.mlp_norm(x)), self.residual)


class PostNormBlock(Block):
    """Attention, then MLP, whose outputs are normalised and added."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        x = added(x, self.attn_norm(self.attn(x, cos, sin, sight)), self.residual)
        return added(x, self.mlp_norm(self.mlp(x)), self.residual)


class Llama(Model):
    """A model of the Llama family."""

    settings: ClassVar[type[DecoderArgs]] = LlamaArgs
    multipliers: ClassVar[tuple[str, ...]] = Multipliers._fields
    inputs: ClassVar[tuple[str, ...]] = ("tok_embed",)
    cuts: ClassVar[dict[str, TensorParallelCut]] = {
        "tok_embed": "tokens",
        "attn.q": "rows",
        "attn.k": "rows",
        "attn.v": "rows",
        "attn.proj": "columns",
        "mlp.gate": "rows",
        "mlp.up": "rows",
        "mlp.proj": "columns",
        "mlp.shared.gate": "rows",
        "mlp.shared.up": "rows",
        "mlp.shared.proj": "columns",
        "output": "rows",
    }

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.n_layer, self.width, self.head_width = args.n_layer, args.n_embd, args.head_width
        self.heads, self.experts = (args.n_head, args.n_kv_head), args.n_expert
        self.tok_embed = Table(args.vocab_size, args.n_embd)
        blocks = {str(number): self.make_block(number) for number in range(args.n_layer)}
        self.blocks = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        own = not args.tied
        self.output = Head(args.n_embd, args.vocab_size) if own else None

    def make_block(self, number: int) -> nn.Module:
        """Return block `number`."""
        args, kind = self.args, PostNormBlock if self.args.post_norms else Block
        return kind(args, Attention(args, number), make_mlp(args, number))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tok_embed(tokens)
        return x

    def transform(self, x: Tensor, positions: Tensor, sight: Sight | None) -> Tensor:
        args, turns, sights = self.args, {}, {None: sight}
        for number, block in self.blocks.items():
            window, letter = args.window_of(int(number)), args.rope_letter(int(number))
            if window is not None and window >= self.seq_len:
                window = None
            if letter not in turns:  # all blocks of a kind share them
                scaled = args if letter != "u" else unscaled(args)
                turns[letter] = rotation(positions, args.rotary_width, scaled)
            if window not in sights:
                sights[window] = Sight.within(window, sight, x, self.dropout)
            x = block(x, *turns[letter], sights[window])
        return x

    def attended(self, number: int) -> int:
        return min(self.args.window_of(number) or self.seq_len, self.seq_len)

    def used_parameters(self, name: str, parameter: Tensor) -> int:
        count = super().used_parameters(name, parameter)
        stack = ".mlp.experts." in name
        return count * self.args.n_expert_used // self.args.n_expert if stack else count

    def describe(self) -> str:
        args, mlp = self.args, f"MLP {self.args.n_inner}"
        if args.n_expert:
            experts = f"{args.n_expert_used} of {args.n_expert} experts {args.expert_width}"
            shared = f" and {args.n_expert_shared} shared" if args.n_expert_shared else ""
            dense = f", after {counted(args.n_dense, 'block')} of {mlp}" if args.n_dense else ""
            mlp = experts + shared + dense
        return (
            f"{counted(args.n_layer, 'layer')}, {counted(args.n_head, 'head')} "
            f"({self.describe_keys()}), width {args.n_embd} ({mlp}), "
            f"vocabulary {args.vocab_size}"
        )

    def describe_keys(self) -> str:
        """Return in words what keys and values are made of."""
        args = self.args
        window = f", window {args.window} in blocks {args.window_blocks}" if args.window else ""
        return f"{args.n_kv_head} of keys and values{window}"
