"""The Llama family: Llama 3 and, by options, Qwen2, Qwen3, Qwen3-MoE, Mixtral and GLM-4.5.

- RMS norms, SwiGLU MLPs and grouped queries. No biases, except `qkv_bias` (Qwen2, GLM-4.5).
- Rotary positions, in float32; GLM-4.5 rotates only half of each head (`rotary_fraction`).
- `rope_scaling_factor` stretches the long wavelengths, as in Llama 3.1.
- `qk_norm` normalises each head's queries and keys (Qwen3).
- The head is a weight of its own or, if `tied`, the token table.
- Experts (moe.py) replace the MLP in all blocks after the first `n_dense`.

Sources: Touvron et al. 2023 (arXiv 2302.13971) for the architecture; Grattafiori et al. 2024 (arXiv
2407.21783) for Llama 3; Yang et al. 2024 and 2025 (arXiv 2407.10671, 2505.09388) for Qwen2 and
Qwen3; Jiang et al. 2024 (arXiv 2401.04088) for Mixtral; GLM-4.5 Team 2025 (arXiv 2508.06471). Sizes
named after published weights have their shapes.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmars.config import ModelConfig
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.model import Head, Model, Table, TensorParallelCut
from torchmars.models.moe import MoE
from torchmars.models.sizes import make_args


def llama(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of Llama 3.1 or 3.2."""
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_inner": n_inner}
    return shape | {"n_kv_head": 8, "rope_theta": 500_000.0, "norm_eps": 1e-5} | more


def qwen3(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of Qwen3."""
    own = {"head_dim": 128, "qk_norm": True, "rope_theta": 1_000_000.0, "norm_eps": 1e-6}
    return llama(n_layer, n_head, n_embd, n_inner) | own | more


def experts(number: int, used: int, inner: int) -> dict[str, Any]:
    """Return the part of a published size that describes its experts."""
    return {
        "n_expert": number,
        "n_expert_used": used,
        "n_expert_inner": inner,
        "norm_topk_prob": True,
    }


def glm(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return the part of a published size of GLM-4.5 that is beside its experts."""
    own = {"head_dim": 128, "rotary_fraction": 0.5, "qkv_bias": True, "rope_theta": 1_000_000.0}
    routed = {"router": "sigmoid", "n_expert_shared": 1}
    return llama(n_layer, n_head, n_embd, n_inner) | own | routed | more


SIZES: dict[str, dict[str, Any]] = {
    "nano": llama(4, 4, 256, 704, n_kv_head=2, rope_theta=10_000.0, tied=True),
    "160m": llama(12, 12, 768, 2304, n_kv_head=4, rope_theta=10_000.0),
    "1b": llama(16, 32, 2048, 8192, rope_scaling_factor=32.0, tied=True),
    "3b": llama(28, 24, 3072, 8192, rope_scaling_factor=32.0, tied=True),
    "8b": llama(32, 32, 4096, 14336, rope_scaling_factor=8.0),
    "70b": llama(80, 64, 8192, 28672, rope_scaling_factor=8.0),
    "405b": llama(126, 128, 16384, 53248, rope_scaling_factor=8.0),
    "qwen3-0.6b": qwen3(28, 16, 1024, 3072, tied=True),
    "qwen3-1.7b": qwen3(28, 16, 2048, 6144, tied=True),
    "qwen3-4b": qwen3(36, 32, 2560, 9728, tied=True),
    "qwen3-8b": qwen3(36, 32, 4096, 12288),
    "qwen3-14b": qwen3(40, 40, 5120, 17408),
    "qwen3-32b": qwen3(64, 64, 5120, 25600),
    "moe-nano": qwen3(4, 4, 192, 512, n_kv_head=2, head_dim=48, rope_theta=10_000.0, tied=True)
    | experts(8, 2, 256),
    "qwen3-30b-a3b": qwen3(48, 32, 2048, 6144, n_kv_head=4) | experts(128, 8, 768),
    "qwen3-235b-a22b": qwen3(94, 64, 4096, 12288, n_kv_head=4) | experts(128, 8, 1536),
    "mixtral-8x7b": llama(32, 32, 4096, 14336, rope_theta=1e6) | experts(8, 2, 14336),
    "mixtral-8x22b": llama(56, 48, 6144, 16384, rope_theta=1e6) | experts(8, 2, 16384),
    "glm-nano": glm(4, 4, 192, 512, n_kv_head=2, head_dim=48, rope_theta=10_000.0, tied=True)
    | experts(8, 2, 256)
    | {"n_dense": 1},
    "glm-4.5-air": glm(46, 96, 4096, 10944) | experts(128, 8, 1408) | {"n_dense": 1},
    "glm-4.5": glm(92, 96, 5120, 12288, qk_norm=True)
    | experts(160, 8, 1536)
    | {"n_dense": 3, "routed_scaling": 2.5},
}
# Llama 3.1's scaling stretches wavelengths of more than ORIGINAL_CONTEXT / LOW tokens, leaves those
# below ORIGINAL_CONTEXT / HIGH, and goes from one to the other between. All its sizes have these.
ORIGINAL_CONTEXT, LOW, HIGH = 8192, 1.0, 4.0


@dataclass(frozen=True)
class LlamaArgs:
    """Shape of a Llama: `n_layer` blocks of `n_head` heads and width `n_embd`."""

    n_layer: int
    n_head: int
    n_kv_head: int
    """Heads of the keys and values."""
    n_embd: int
    n_inner: int
    """Width within an MLP that is no expert."""
    vocab_size: int
    """Rows of the token table."""
    seq_len: int
    head_dim: int | None = None
    """Width of a head. None: `n_embd / n_head`."""
    rope_theta: float = 10_000.0
    rope_scaling_factor: float = 1.0
    rotary_fraction: float = 1.0
    """The part of each head, from its first dim, that is rotated."""
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    n_expert: int = 0
    """Experts of each block. 0: all blocks have an MLP."""
    n_dense: int = 0
    """First blocks that have an MLP all the same."""
    n_expert_used: int = 2
    """Experts that each token uses."""
    n_expert_inner: int = 0
    """Width within an expert. 0: `n_inner`."""
    n_expert_shared: int = 0
    """Experts that all tokens use besides: one MLP, as wide as they are together."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become scores."""
    norm_topk_prob: bool = True
    routed_scaling: float = 1.0
    """The factor of the chosen experts' outputs."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that is rotated."""
        return round(self.head_width * self.rotary_fraction)

    @property
    def expert_width(self) -> int:
        """Width within an expert."""
        return self.n_expert_inner or self.n_inner

    def check(self) -> None:
        """Raise `UserError` for a shape that cannot be built."""
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd = {self.n_embd} does not divide into model.n_head = {self.n_head} "
                f"heads: choose a multiple of {self.n_head}, or set model.head_dim"
            )
        if self.head_width % 2:
            raise UserError(
                f"heads of width {self.head_width} cannot be rotated, since that is odd: set "
                "model.head_dim to an even number"
            )
        if self.n_head % self.n_kv_head:
            raise UserError(
                f"model.n_head = {self.n_head} does not divide into groups for model.n_kv_head = "
                f"{self.n_kv_head}: choose a multiple of {self.n_kv_head}"
            )
        rotated = self.head_width * self.rotary_fraction
        if self.rotary_width % 2 or not math.isclose(self.rotary_width, rotated):
            raise UserError(
                f"model.rotary_fraction = {self.rotary_fraction:g} of heads of width "
                f"{self.head_width} is no even number of dims: choose another"
            )
        self.check_experts()

    def check_experts(self) -> None:
        """Raise `UserError` for experts that cannot be built."""
        if not self.n_expert:
            none = {"n_expert_shared": 0, "n_dense": 0, "router": "softmax", "routed_scaling": 1.0}
            own = {name: getattr(self, name) for name in none}
            names = [name for name, value in own.items() if value != none[name]]
            if names:
                raise UserError(
                    f"{', '.join(f'model.{name} = {own[name]}' for name in names)} has no meaning "
                    f"without experts: set it to {', '.join(str(none[name]) for name in names)}, "
                    "or model.n_expert to more than 0"
                )
            return
        if self.n_expert_used > self.n_expert:
            raise UserError(
                f"model.n_expert_used = {self.n_expert_used} is more than model.n_expert = "
                f"{self.n_expert}: choose at most as many"
            )
        if self.n_dense >= self.n_layer:
            raise UserError(
                f"model.n_dense = {self.n_dense} leaves no block of model.n_layer = {self.n_layer} "
                "for experts: lower it, or set model.n_expert = 0"
            )


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_width = args.head_width
        q_width, kv_width = args.n_head * args.head_width, args.n_kv_head * args.head_width
        self.q = nn.Linear(args.n_embd, q_width, bias=args.qkv_bias)
        self.k = nn.Linear(args.n_embd, kv_width, bias=args.qkv_bias)
        self.v = nn.Linear(args.n_embd, kv_width, bias=args.qkv_bias)
        self.q_norm = nn.RMSNorm(args.head_width, args.norm_eps) if args.qk_norm else None
        self.k_norm = nn.RMSNorm(args.head_width, args.norm_eps) if args.qk_norm else None
        self.proj = nn.Linear(q_width, args.n_embd, bias=False)
        self.attend = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        # By the width of a head: a rank may have some of the heads only.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)) for layer in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, sight)
        projected: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return projected


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


def make_mlp(args: LlamaArgs, number: int) -> MLP | MoE:
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
    )


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, args: LlamaArgs, number: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        self.attn = Attention(args)
        self.mlp_norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        self.mlp = make_mlp(args, number)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sight: Sight | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, sight)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Model):
    """A model of the Llama family."""

    sizes = SIZES
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

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args, self.n_layer, self.head_width = args, args.n_layer, args.head_width
        self.seq_len, self.width, self.vocab_rows = args.seq_len, args.n_embd, args.vocab_size
        self.heads, self.experts = (args.n_head, args.n_kv_head), args.n_expert
        self.tok_embed = Table(args.vocab_size, args.n_embd)
        blocks = {str(number): Block(args, number) for number in range(args.n_layer)}
        self.blocks = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(args.n_embd, args.norm_eps)
        own = not args.tied
        self.output = Head(args.n_embd, args.vocab_size) if own else None

    @classmethod
    def from_config(cls, config: ModelConfig, vocab_size: int, seq_len: int) -> Self:
        args = make_args(config, LlamaArgs, cls.sizes[config.size], vocab_size, seq_len)
        args.check()
        return cls(args)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tok_embed(tokens)
        return x

    def transform(self, x: Tensor, positions: Tensor, sight: Sight | None) -> Tensor:
        args = self.args
        cos, sin = rotation(positions, args.rotary_width, args.rope_theta, args.rope_scaling_factor)
        for block in self.blocks.values():
            x = block(x, cos, sin, sight)
        return x

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
            f"({args.n_kv_head} of keys and values), width {args.n_embd} ({mlp}), "
            f"vocabulary {args.vocab_size}"
        )


def rotation(
    positions: Tensor, width: int, theta: float, scaling_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of `positions` [length] or [batch, length], float32.

    Both are [1 or batch, 1, length, width / 2], where `width` of each head is rotated. Pair i turns
    by theta^(-2i / width) for each position (Su et al. 2021, arXiv 2104.09864, equation 15), or as
    `scaling_factor` changes that.
    """
    dims = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (dims / width)
    if scaling_factor != 1.0:
        # The part that stays: 1 for the short wavelengths, 0 for the long ones.
        turns = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
        kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling_factor
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-3)
    angles = angles if angles.ndim == 4 else angles.unsqueeze(0)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `heads` [batch, heads, length, head width] with each pair of dims turned.

    Of the first w dims, for which `cos` and `sin` have w / 2 angles, i and i + w / 2 are a pair, as
    in transformers. The others stay. The turn is computed in float32, since an angle's cosine in
    bfloat16 is off by up to 0.4%.
    """
    width = 2 * cos.shape[-1]
    first, second = heads[..., :width].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = turned.to(heads.dtype)
    return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)
