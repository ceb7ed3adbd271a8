"""The settings and the named sizes of the Llama family.

Sizes named after published weights have their shapes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torchmars.config.model_args import ModelArgs, Sizes
from torchmars.core.bounds import Range
from torchmars.core.errors import UserError


def llama(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of Llama 3.1 or 3.2."""
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_inner": n_inner}
    return shape | {"n_kv_head": 8, "rope_theta": 500_000.0, "norm_eps": 1e-5} | more


def qwen3(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of Qwen3."""
    own = {"head_dim": 128, "qk_norm": True, "rope_theta": 1_000_000.0, "norm_eps": 1e-6}
    return llama(n_layer, n_head, n_embd, n_inner) | own | more


def routed(number: int, used: int, inner: int) -> dict[str, Any]:
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


SIZES = {
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
    | routed(8, 2, 256),
    "qwen3-30b-a3b": qwen3(48, 32, 2048, 6144, n_kv_head=4) | routed(128, 8, 768),
    "qwen3-235b-a22b": qwen3(94, 64, 4096, 12288, n_kv_head=4) | routed(128, 8, 1536),
    "mixtral-8x7b": llama(32, 32, 4096, 14336, rope_theta=1e6) | routed(8, 2, 14336),
    "mixtral-8x22b": llama(56, 48, 6144, 16384, rope_theta=1e6) | routed(8, 2, 16384),
    "glm-nano": glm(4, 4, 192, 512, n_kv_head=2, head_dim=48, rope_theta=10_000.0, tied=True)
    | routed(8, 2, 256)
    | {"n_dense": 1},
    "glm-4.5-air": glm(46, 96, 4096, 10944) | routed(128, 8, 1408) | {"n_dense": 1},
    "glm-4.5": glm(92, 96, 5120, 12288, qk_norm=True)
    | routed(160, 8, 1536)
    | {"n_dense": 3, "routed_scaling": 2.5},
}


@dataclass(frozen=True, kw_only=True)
class LlamaArgs(ModelArgs):
    """What a model of the Llama family is made from."""

    sizes: ClassVar[Sizes] = SIZES
    grows: ClassVar[tuple[str, ...]] = (
        "n_embd",
        "n_head",
        "n_kv_head",
        "n_inner",
        "n_expert_inner",
    )

    n_layer: Annotated[int, Range(1, 1_000)]
    """Number of blocks."""
    n_head: Annotated[int, Range(1, 10_000)]
    """Attention heads of each block."""
    n_kv_head: Annotated[int, Range(1, 10_000)]
    """Heads of the keys and values, each shared by n_head / n_kv_head queries."""
    head_dim: Annotated[int, Range(2, 10_000)] | None = None
    """Width of a head. That is n_embd / n_head; 128 for Qwen3."""
    n_embd: Annotated[int, Range(1, 1_000_000)]
    """Width."""
    n_inner: Annotated[int, Range(1, 10_000_000)]
    """Width within the MLP."""

    rope_theta: Annotated[float, Range(1, 1e12)] = 10_000.0
    """Base of the wavelengths of rotary positions."""
    rope_scaling_factor: Annotated[float, Range(1, 1_000)] = 1.0
    """Stretch the rotary wavelengths of more than 8,192 tokens by this, as Llama 3.1 does. 1: leave
    them."""
    rotary_fraction: Annotated[float, Range(0.01, 1)] = 1.0
    """The part of each head, from its first dim, that rotary positions turn. 0.5 in GLM-4.5."""

    norm_eps: Annotated[float, Range(0, 1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """Normalise each head's query and key, as Qwen3 does."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as in Qwen2."""
    tied: bool = False
    """Let the token table be the head too."""

    n_expert: Annotated[int, Range(0, 10_000)] = 0
    """Experts of each block. 0: one MLP for all tokens."""
    n_dense: Annotated[int, Range(0, 1_000)] = 0
    """First blocks that have one MLP for all tokens instead of experts."""
    n_expert_used: Annotated[int, Range(1, 1_000)] = 2
    """Experts that each token uses."""
    n_expert_inner: Annotated[int, Range(1, 10_000_000)] | None = None
    """Width within an expert. That is n_inner where the size has none."""
    n_expert_shared: Annotated[int, Range(0, 1_000)] = 0
    """Experts that all tokens use besides. They are one MLP of width n_expert_shared *
    n_expert_inner."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become scores. softmax: over all experts. sigmoid: of each alone, and
    experts are chosen by score and a bias, as in GLM-4.5."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum, as Mixtral does."""
    routed_scaling: Annotated[float, Range(0.001, 1_000)] = 1.0
    """The factor of the outputs of a token's chosen experts."""

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
