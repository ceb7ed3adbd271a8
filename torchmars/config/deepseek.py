"""The settings and the named sizes of the DeepSeek family: latent attention, and experts.

Sizes named after published weights have their shapes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torchmars.config.fields import Mark
from torchmars.config.model_args import DecoderArgs, Sizes
from torchmars.core.check import Interval
from torchmars.core.errors import UserError


def published(n_layer: int, n_head: int, n_embd: int, n_inner: int, **more: Any) -> dict[str, Any]:
    """Return a size, with what most published ones have."""
    own: dict[str, Any] = {"q_lora_rank": 1536, "kv_lora_rank": 512, "router": "sigmoid"}
    own |= {"n_dense": 1, "n_expert_shared": 1}
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_inner": n_inner}
    return shape | own | heads | {"norm_eps": 1e-6, "tied": False} | more


def sigmoid_routed(number: int, used: int, inner: int, scaling: float) -> dict[str, Any]:
    """Return the part of a size that describes its experts."""
    own = {"n_expert": number, "n_expert_used": used, "n_expert_inner": inner}
    return own | {"routed_scaling": scaling, "norm_topk_prob": True}


def yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    """Return the part of a size that describes its rotary positions, stretched from 4,096."""
    own = {"rope_scaling_factor": factor, "rope_scaling": "yarn", "rope_original_len": 4096}
    own |= {"rope_beta_fast": beta_fast, "rope_attention_factor": 1.0}
    return own | {"rope_logit_factor": 1.0}


SIZES = {
    "nano": published(4, 4, 192, 512, q_lora_rank=96, kv_lora_rank=64, tied=True)
    | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rope_theta": 10_000.0}
    | sigmoid_routed(8, 2, 256, 2.5),
    "moonlight-16b-a3b": published(27, 16, 2048, 11264, q_lora_rank=0, norm_eps=1e-5)
    | sigmoid_routed(64, 6, 1408, 2.446)
    | {"n_expert_shared": 2, "rope_theta": 50_000.0},
    "glm-4.7-flash": published(47, 20, 2048, 10240, q_lora_rank=768, norm_eps=1e-5)
    | {"qk_nope_head_dim": 192, "v_head_dim": 256, "rope_theta": 1_000_000.0}
    | sigmoid_routed(64, 4, 1536, 1.8),
    "deepseek-v3": published(61, 128, 7168, 18432, n_dense=3)
    | {"rope_theta": 10_000.0}
    | yarn(40.0, 32.0)
    | sigmoid_routed(256, 8, 2048, 2.5)
    | {"n_group": 8, "topk_group": 4},
    "kimi-k2": published(61, 64, 7168, 18432)
    | {"rope_theta": 50_000.0}
    | yarn(64.0, 1.0)
    | sigmoid_routed(384, 8, 2048, 2.827),
}


@dataclass(frozen=True, kw_only=True)
class DeepseekArgs(DecoderArgs):
    """What a model of the DeepSeek family is made from."""

    sizes: ClassVar[Sizes] = SIZES
    grows: ClassVar[tuple[str, ...]] = (
        "n_embd",
        "n_head",
        "n_inner",
        "n_expert_inner",
        "q_lora_rank",
        "kv_lora_rank",
    )

    q_lora_rank: Annotated[int, Interval(ge=0, le=100_000)]
    """Width of the latents that queries are made from. 0: they are made from hidden states."""
    kv_lora_rank: Annotated[int, Interval(ge=1, le=100_000)]
    """Width of the latents that keys and values are made from."""
    qk_nope_head_dim: Annotated[int, Interval(ge=1, le=10_000)]
    """Width of the part of each head's query and key that has no position."""
    qk_rope_head_dim: Annotated[int, Interval(ge=2, le=10_000)]
    """Width of the part that is rotated. All heads share that of keys."""
    v_head_dim: Annotated[int, Interval(ge=1, le=10_000)]
    """Width of each head's values."""
    rope_interleave: bool = True
    """Rotate neighbouring dims as pairs, as published weights want it. false: those of two
    halves."""
    rope_logit_factor: Annotated[float, Interval(ge=0, le=100)] = 0.0
    """Where rotary positions are stretched: attention logits are times (0.1 * this *
    ln(rope_scaling_factor) + 1)^2. 1 in DeepSeek-V3, whose config.json calls it mscale_all_dim."""
    n_group: Annotated[int, Interval(ge=1, le=10_000), Mark.NO_SHAPE] = 1
    """Groups of experts. A token chooses groups first, then experts in them."""
    topk_group: Annotated[int, Interval(ge=1, le=10_000), Mark.NO_SHAPE] = 1
    """Groups that each token chooses."""

    @property
    def n_kv_head(self) -> int:
        """Heads of the keys and values: as many as of queries."""
        return self.n_head

    @property
    def head_width(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.qk_rope_head_dim

    @property
    def groups(self) -> tuple[int, int]:
        return self.n_group, self.topk_group

    @property
    def attention_scale(self) -> float:
        """What multiplies attention logits."""
        grown = 0.1 * self.rope_logit_factor * math.log(self.rope_scaling_factor) + 1
        return self.multipliers.attention * self.head_width**-0.5 * grown**2

    def check(self) -> None:
        if self.rotary_width % 2:
            raise UserError(
                f"model.qk_rope_head_dim = {self.rotary_width} cannot be rotated, since it is odd: "
                "choose an even number"
            )
        self.check_rope()
        self.check_experts()
        self.check_groups()

    def check_groups(self) -> None:
        """Raise `UserError` for groups that experts cannot be chosen from."""
        experts, groups, used = self.n_expert, self.n_group, self.topk_group
        if used > groups:
            raise UserError(
                f"model.topk_group = {used} is more than model.n_group = {groups}: choose at most "
                "as many"
            )
        if groups == 1:
            return
        if self.router != "sigmoid":
            raise UserError(
                f"model.n_group = {groups} has no meaning with a softmax router: set "
                'model.router = "sigmoid", or model.n_group = 1'
            )
        if experts % groups or experts < 2 * groups:
            raise UserError(
                f"model.n_group = {groups} needs two experts or more in each group, equally many: "
                f"choose a model.n_expert, which is {experts}, of a multiple of {groups}, at least "
                f"{2 * groups}, or model.n_group = 1"
            )
        if self.n_expert_used > experts // groups * used:
            raise UserError(
                f"model.topk_group = {used} of {groups} groups leaves {experts // groups * used} "
                f"experts, fewer than model.n_expert_used = {self.n_expert_used}: raise it"
            )
