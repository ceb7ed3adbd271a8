"""The DeepSeek family: DeepSeek-V3 and, by options, Moonlight, Kimi K2 and GLM-4.7-Flash.

- Multi-head latent attention (latent.py), with latents of queries too or without (`q_lora_rank`).
- All else is as in the Llama family: RMS norms, SwiGLU MLPs, rotary positions.
- Experts (moe.py) replace the MLP in all blocks after the first `n_dense`. Routers are sigmoids,
  and a token may choose groups of experts first (`n_group`).

Sources: DeepSeek-AI 2024 (arXiv 2412.19437) for DeepSeek-V3; Liu et al. 2025 (arXiv 2502.16982) for
Moonlight; Kimi Team 2025 (arXiv 2507.20534) for Kimi K2. Without their multi-token prediction.
"""

from typing import ClassVar

from torch import nn

from torchmars.config.deepseek import DeepseekArgs
from torchmars.config.model_args import Multipliers
from torchmars.models.latent import LatentAttention
from torchmars.models.llama import Block, Llama, make_mlp
from torchmars.models.model import TensorParallelCut


class Deepseek(Llama):
    """A model of the DeepSeek family."""

    settings = DeepseekArgs
    multipliers: ClassVar[tuple[str, ...]] = Multipliers._fields
    cuts: ClassVar[dict[str, TensorParallelCut]] = {
        **{name: cut for name, cut in Llama.cuts.items() if name not in ("attn.k", "attn.v")},
        "attn.q": "gathered rows",
        "attn.q_a": "whole",
        "attn.q_b": "gathered rows",
        "attn.kv_a": "whole",
        "attn.kv_b": "gathered rows",
    }

    def make_block(self, number: int) -> nn.Module:
        return Block(self.args, LatentAttention(self.args), make_mlp(self.args, number))

    def describe_keys(self) -> str:
        return f"latents of {self.args.kv_lora_rank} and {self.args.qk_rope_head_dim}"

    @property
    def mixed_width(self) -> int:
        return self.heads[0] * (self.head_width + self.args.v_head_dim)

    @property
    def kept_width(self) -> int:
        return int(self.args.kv_lora_rank + self.args.qk_rope_head_dim)
