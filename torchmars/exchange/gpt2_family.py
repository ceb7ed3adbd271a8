"""GPT-2 in Hugging Face's transformers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchmars.exchange.family import Counterpart, Family, ModelKind, keys_of, require_all, shape_of
from torchmars.models.gpt2 import GPT2
from torchmars.models.model import Model

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
LINEAR = ("qkv.weight", "up.weight", "proj.weight")
SCALES = "scale_attn_by_inverse_layer_idx"


class GPT2Family(Family):
    """GPT-2, whose layers there hold weights as [in, out], and always have biases."""

    model = GPT2
    kinds = {
        "gpt2": ModelKind(
            {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size", SCALES)}
            | {"seq_len": "n_positions"},
            {
                "activation_function": [*ACTIVATIONS.values()],
                "layer_norm_epsilon": [1e-5],
                "tie_word_embeddings": [True],
                "scale_attn_weights": [True],
                SCALES: [False, True],
                "add_cross_attention": [False],
            },
            ["n_inner"],
        )
    }
    names = {
        "tok_embed": "transformer.wte",
        "pos_embed": "transformer.wpe",
        "norm": "transformer.ln_f",
        "blocks": "transformer.h",
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
        "qkv": "c_attn",
        "up": "c_fc",
        "proj": "c_proj",
    }
    base = "transformer."

    def section(self, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        found = shape_of(self.kinds[kind], config)
        require_all(config, {"n_inner": [None, 4 * found["n_embd"]]})
        ours = {theirs: name for name, theirs in ACTIVATIONS.items()}
        activation = ours[config["activation_function"]]
        return found | {"name": "gpt2", "bias": True, "activation": activation}

    def config(self, model: GPT2) -> dict[str, Any]:
        args = model.args
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **keys_of(self.kinds["gpt2"], args),
            "activation_function": ACTIVATIONS[args.activation],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout),
        }

    def counterparts(self, model: Model, fused: bool) -> dict[str, Counterpart]:
        found = super().counterparts(model, fused)
        return {
            name: replace(there, transposed=name.endswith(LINEAR)) for name, there in found.items()
        }

    def with_their_parameters(self, model: Model) -> Model:
        with torch.device("meta"):
            return GPT2(replace(model.args, bias=True))
