"""The settings and the named sizes of the Llama family.

Sizes named after published weights have their shapes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torchmars.config.fields import Mark
from torchmars.config.model_args import DecoderArgs, Sizes
from torchmars.core.check import Interval
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


def mistral(n_layer: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of Mistral."""
    return llama(n_layer, 32, n_embd, n_inner) | {"rope_theta": 1e6} | more


def olmo3(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a published size of OLMo 3."""
    own = {"norm_eps": 1e-6, "qk_norm": True, "qk_norm_whole": True, "post_norms": True}
    windows = {"window": 4096, "window_blocks": "sssf", "rope_blocks": "uuur"}
    rope = {"rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_len": 8192}
    return llama(n_layer, n_head, n_embd, n_inner) | own | windows | rope | more


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
    "mistral-7b-v0.1": mistral(32, 4096, 14336, rope_theta=1e4, window=4096),
    "mistral-7b-v0.3": mistral(32, 4096, 14336),
    "mistral-nemo": mistral(40, 5120, 14336, head_dim=128),
    "mistral-small-24b": mistral(40, 5120, 32768, head_dim=128, rope_theta=1e8),
    "ministral-8b": mistral(36, 4096, 12288, rope_theta=1e8, window=32_768),
    "smollm-nano": llama(4, 4, 256, 704, n_kv_head=2, rope_theta=10_000.0, tied=True)
    | {"rope_blocks": "rrrn", "window": 128, "window_blocks": "sssf"},
    "smollm3-3b": llama(36, 16, 2048, 11008, n_kv_head=4, rope_theta=5e6, norm_eps=1e-6, tied=True)
    | {"rope_blocks": "rrrn"},
    "olmo-nano": olmo3(4, 4, 256, 704, n_kv_head=2, window=128, rope_original_len=256),
    "olmo3-7b": olmo3(32, 32, 4096, 11008, n_kv_head=32),
    "olmo3-32b": olmo3(64, 40, 5120, 27648),
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
class LlamaArgs(DecoderArgs):
    """What a model of the Llama family is made from."""

    sizes: ClassVar[Sizes] = SIZES
    grows: ClassVar[tuple[str, ...]] = (
        "n_embd",
        "n_head",
        "n_kv_head",
        "n_inner",
        "n_expert_inner",
    )

    n_kv_head: Annotated[int, Interval(ge=1, le=10_000)]
    """Heads of the keys and values, each shared by n_head / n_kv_head queries."""
    head_dim: Annotated[int, Interval(ge=2, le=10_000)] | None = None
    """Width of a head. That is n_embd / n_head; 128 for Qwen3."""

    rotary_fraction: Annotated[float, Interval(ge=0.01, le=1)] = 1.0
    """The part of each head, from its first dim, that rotary positions turn. 0.5 in GLM-4.5."""
    rope_blocks: str = "r"
    """Which blocks have rotary positions, a letter each: r has them, u has them unscaled, n has
    none. "rrrn": every fourth block has none, as in SmolLM3. Fewer letters than blocks are
    repeated."""
    window: Annotated[int, Interval(ge=1, le=100_000_000), Mark.NO_SHAPE] | None = None
    """Tokens that a token attends to in the blocks of window_blocks: itself and those before it.
    Default: all."""
    window_blocks: str = "s"
    """Which blocks have the window, a letter each: s (sliding) has it, f (full) has none. "sssf":
    every fourth block has none. Fewer letters than blocks are repeated."""

    qk_norm: bool = False
    """Normalise each head's query and key, as Qwen3 does."""
    qk_norm_whole: bool = False
    """Let qk_norm normalise all heads of a token at once, as OLMo 3 does."""
    post_norms: bool = False
    """Normalise what attention and MLP return, not what they take, as OLMo 3 does."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as in Qwen2."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that is rotated."""
        return round(self.head_width * self.rotary_fraction)

    def rope_letter(self, number: int) -> str:
        return self.rope_blocks[number % len(self.rope_blocks)]

    def window_of(self, number: int) -> int | None:
        slides = self.window_blocks[number % len(self.window_blocks)] == "s"
        return self.window if slides else None

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
        check_pattern("rope_blocks", self.rope_blocks, "run")
        check_pattern("window_blocks", self.window_blocks, "sf")
        if self.window is None and self.window_blocks != "s":
            raise UserError(
                f"model.window_blocks = {self.window_blocks!r} has no meaning without model.window"
            )
        if self.qk_norm_whole and not self.qk_norm:
            raise UserError("model.qk_norm_whole = true has no meaning without model.qk_norm")
        self.check_rope()
        self.check_experts()


def check_pattern(name: str, pattern: str, letters: str) -> None:
    """Raise `UserError` for a pattern of blocks that has other letters, or none."""
    if not pattern or set(pattern) - set(letters):
        raise UserError(
            f"model.{name} = {pattern!r}: write a letter for each block, {', '.join(letters)}"
        )
