"""Gemma 3, text only, as a plugin: a family of models in one file.

It differs from Llama in norms before and after attention and MLP, whose weights count from 1, in
embeddings times the root of the width, in GELU, and in rotary positions of two wavelengths.

Source: Gemma Team 2025 (arXiv 2503.19786).
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import nn

from torchmars import register
from torchmars.config.fields import Mark
from torchmars.config.llama import LlamaArgs
from torchmars.config.model import MODELS
from torchmars.core.errors import UserError
from torchmars.exchange.families import FAMILIES
from torchmars.exchange.family import ModelKind, keys_of, number, require_all, shape_of
from torchmars.exchange.llama_family import (
    FULL,
    LLAMA_NAMES,
    ROPE,
    SHAPE,
    WINDOW,
    LlamaFamily,
    rope_config,
    rope_of,
    shortest,
)
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.llama import MLP, Llama
from torchmars.models.llama import Attention as LlamaAttention
from torchmars.models.model import added
from torchmars.models.rotary import rotation, unscaled


def size(n_layer, n_head, n_embd, n_inner, **more):
    """Return a published size."""
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_inner": n_inner}
    own = {"head_dim": 256, "rope_theta": 1e6, "norm_eps": 1e-6, "tied": True, "qk_norm": True}
    return shape | own | {"window": 1024, "window_blocks": "sssssf", "query_width": 256} | more


# Llama's settings that Gemma 3 does not have.
FIXED = {"tied": True, "qk_norm": True, "qk_norm_whole": False, "post_norms": False}
FIXED |= {"qkv_bias": False, "n_expert": 0, "rotary_fraction": 1.0, "rope_blocks": "r"}
LONG = {"rope_scaling": "linear", "rope_scaling_factor": 8.0}


@dataclass(frozen=True, kw_only=True)
class Gemma3Args(LlamaArgs):
    """The settings of Llama, and three more."""

    sizes = {
        "nano": size(6, 4, 192, 512, n_kv_head=2, head_dim=48, window=128, query_width=48),
        "270m": size(18, 4, 640, 2048, n_kv_head=1, window=512),
        "1b": size(26, 4, 1152, 6912, n_kv_head=1, window=512),
        "4b": size(34, 8, 2560, 10240, n_kv_head=4) | LONG,
        "12b": size(48, 16, 3840, 15360, n_kv_head=8) | LONG,
        "27b": size(62, 32, 5376, 21504, n_kv_head=16, head_dim=128, query_width=168) | LONG,
    }

    query_width: Annotated[int, Interval(ge=1, le=1_000_000), Mark.NO_SHAPE]
    """Attention logits are divided by its root. query_pre_attn_scalar there."""
    rope_theta_window: Annotated[float, Interval(ge=1, le=1e12)] = 10_000.0
    """Base of the wavelengths of blocks with a window, which no scaling stretches."""

    def check(self) -> None:
        super().check()
        for name, value in FIXED.items():
            if getattr(self, name) != value:
                raise UserError(f"model.{name} of a Gemma 3 must be {value}")


class Norm(nn.RMSNorm):
    """RMSNorm whose weight is what is added to 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class Attention(LlamaAttention):
    """Llama's, with norms of its own kind and another scale."""

    def __init__(self, args: Gemma3Args, number: int) -> None:
        super().__init__(args, number)
        self.q_norm = Norm(args.head_width, args.norm_eps)
        self.k_norm = Norm(args.head_width, args.norm_eps)
        self.attend = CausalAttention(args.multipliers.attention * args.query_width**-0.5)


class GeluMLP(MLP):
    """Llama's, with GELU by tanh in place of SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Block(nn.Module):
    """Attention, then MLP, each between two norms."""

    def __init__(self, args: Gemma3Args, number: int) -> None:
        super().__init__()
        self.residual = args.multipliers.residual
        self.attn, self.mlp = Attention(args, number), GeluMLP(args.n_embd, args.n_inner)
        self.attn_norm, self.attn_out_norm, self.mlp_norm, self.mlp_out_norm = (
            Norm(args.n_embd, args.norm_eps) for _ in range(4)
        )

    def forward(self, x, cos, sin, sight):
        y = self.attn(self.attn_norm(x), cos, sin, sight)
        x = added(x, self.attn_out_norm(y), self.residual)
        return added(x, self.mlp_out_norm(self.mlp(self.mlp_norm(x))), self.residual)


class Gemma3(Llama):
    """A model of Gemma 3."""

    settings = Gemma3Args
    multipliers = Llama.multipliers

    def __init__(self, args: Gemma3Args) -> None:
        super().__init__(args)
        self.norm = Norm(args.n_embd, args.norm_eps)

    def make_block(self, number):
        return Block(self.args, number)

    def init_std(self, name: str) -> float | None:
        return 0.0 if "norm" in name else super().init_std(name)

    def embed(self, tokens, positions):
        return self.tok_embed(tokens) * self.width**0.5

    def transform(self, x, positions, sight):
        args = self.args
        narrow = replace(unscaled(args), rope_theta=args.rope_theta_window)
        kinds = {
            "f": (*rotation(positions, args.head_width, args), sight),
            "s": (
                *rotation(positions, args.head_width, narrow),
                Sight.within(args.window, sight, x, 0.0),
            ),
        }
        for name, block in self.blocks.items():
            x = block(x, *kinds["s" if args.window_of(int(name)) else "f"])
        return x


KIND = "gemma3_text"


class Gemma3Family(LlamaFamily):
    """Gemma 3 in transformers, both ways."""

    model = Gemma3
    kinds = {
        KIND: ModelKind(
            SHAPE | {"query_width": "query_pre_attn_scalar"},
            {
                "hidden_activation": ["gelu_pytorch_tanh"],
                "attention_bias": [False],
                "attn_logit_softcapping": [None],  # transformers reads it, and never uses it
                "final_logit_softcapping": [None],
                "tie_word_embeddings": [True],
                "use_bidirectional_attention": [None, False],
            },
            (*ROPE, "rope_local_base_freq", "sliding_window", "sliding_window_pattern")
            + ("layer_types",),
        )
    }
    names = LLAMA_NAMES | {
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }

    def section(self, kind, config):
        types, tables = config["layer_types"], config["rope_parameters"]
        for each in types:
            require_all({"layer_types": each}, {"layer_types": [FULL, WINDOW]})
        narrow = tables[WINDOW]
        require_all(narrow, {"rope_type": ["default"]})
        return {
            **shape_of(self.kinds[kind], config),
            **rope_of(kind, {**config, "rope_parameters": tables[FULL]}),
            "rope_theta_window": number(narrow, "rope_theta"),
            "name": "gemma3",
            "qk_norm": True,
            "window": number(config, "sliding_window", 1),
            "window_blocks": shortest("".join(each[0] for each in types)),
        }

    def config(self, model):
        args = model.args
        slides = [args.window_of(number) is not None for number in range(args.n_layer)]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": KIND,
            **keys_of(self.kinds[KIND], args),
            "rope_scaling": None,
            **rope_config(args),
            "rope_local_base_freq": args.rope_theta_window,
            "sliding_window": args.window,
            "layer_types": [WINDOW if each else FULL for each in slides],
        }


register(FAMILIES, "gemma3", Gemma3Family())
register(MODELS, "gemma3", Gemma3)
