"""The tensors of the same models in Hugging Face's transformers: names and contents."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchmars.config.llama import LlamaArgs
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama
from torchmars.models.model import Model

# The name there of each part of a name. A dotted name stands for itself before its parts.
GPT2_NAMES = {
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
LLAMA_NAMES = {
    "tok_embed": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "mlp.proj": "mlp.down_proj",
    "proj": "o_proj",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "q_a", "q_b", "kv_b")},
    "kv_a": "kv_a_proj_with_mqa",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
}
# OLMo 3's, whose norms come after attention and MLP.
OLMO_NAMES = LLAMA_NAMES | {
    "attn_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
# The table of each class of models. A plugin's class enters its own.
NAMES: dict[type[Model], dict[str, str]] = {GPT2: GPT2_NAMES, Llama: LLAMA_NAMES}
# Ends of a mixture's names. "*" stands for the number of an expert.
QWEN3_MOE_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.gate": "mlp.experts.*.gate_proj.weight",
    "mlp.experts.up": "mlp.experts.*.up_proj.weight",
    "mlp.experts.proj": "mlp.experts.*.down_proj.weight",
}
MIXTRAL_NAMES = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate": "block_sparse_moe.experts.*.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.proj": "block_sparse_moe.experts.*.w2.weight",
}
GLM_NAMES = QWEN3_MOE_NAMES | {
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "mlp.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "mlp.shared.proj.weight": "mlp.shared_experts.down_proj.weight",
}
NAMES_BY_KIND = {"qwen3_moe": QWEN3_MOE_NAMES, "mixtral": MIXTRAL_NAMES, "glm4_moe": GLM_NAMES}
# All of them as transformers 5 holds them, and saves them without save_original_format.
GATE_UP = "mlp.experts.gate_up_proj"
FUSED_NAMES = GLM_NAMES | {
    "mlp.experts.gate": GATE_UP,
    "mlp.experts.up": GATE_UP,
    "mlp.experts.proj": "mlp.experts.down_proj",
}


@dataclass(frozen=True)
class Counterpart:
    """A tensor there: its name, and whether it is our weight [out, in] transposed."""

    name: str
    transposed: bool = False
    experts: int = 0
    """Of a stack whose matrices are a tensor each. The name has "*" for the expert's number."""
    half: int | None = None
    """Which half of the rows of each matrix it is, where two stacks are one tensor."""

    @property
    def names(self) -> list[str]:
        """The names of all tensors there."""
        return [self.name.replace("*", str(n)) for n in range(self.experts)] or [self.name]


def counterparts(model: Model, fused: bool = False) -> dict[str, Counterpart]:
    """Return the tensor there of each parameter and buffer of `model`, by our name.

    GPT-2's layers there hold their weights as [in, out]. `fused`: experts are as transformers 5
    holds them, in stacks; otherwise each matrix is a tensor, as in most files.
    """
    if isinstance(model, Llama) and model.args.n_expert:
        return mixture_counterparts(model, fused)
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    names = next(NAMES[each] for each in type(model).__mro__ if each in NAMES)
    if type(model) is Llama and model.args.post_norms:
        names = OLMO_NAMES
    transpose = linear if isinstance(model, GPT2) else frozenset()
    return {
        name: Counterpart(their_name(name, names), name in transpose) for name in model.state_dict()
    }


def mixture_counterparts(model: Llama, fused: bool) -> dict[str, Counterpart]:
    """Return the counterparts of a model with experts."""
    names = FUSED_NAMES if fused else NAMES_BY_KIND[mixture_kind(model.args)]
    found = {}
    for name in model.state_dict():
        end = name[name.find("mlp.") :]
        if end not in names:
            found[name] = Counterpart(their_name(name, LLAMA_NAMES))
            continue
        there = their_name(name.removesuffix(end), LLAMA_NAMES) + names[end]
        half = ("gate", "up").index(end.split(".")[-1]) if names[end] == GATE_UP else None
        experts = model.args.n_expert if "*" in there else 0
        found[name] = Counterpart(there, experts=experts, half=half)
    return found


def mixture_kind(args: LlamaArgs) -> str:
    """Return transformers' name for the kind of a model with experts. DeepSeek-V3 has GLM-4.5's."""
    if args.router == "sigmoid" or not isinstance(args, LlamaArgs):
        return "glm4_moe"
    return "qwen3_moe" if args.qk_norm else "mixtral"


def base_of(model: Model) -> str:
    """Return the prefix there of all tensors except the head.

    A model that was saved without its head has none of it in its names.
    """
    return "transformer." if isinstance(model, GPT2) else "model."


def left_out(model: Model) -> tuple[str, ...]:
    """Return prefixes of tensors there that `model` has no use for.

    GLM-4.5 and DeepSeek-V3 are published with one more layer, which predicts the token after the
    next one.
    """
    more = isinstance(model, Llama) and model.args.router == "sigmoid"
    return (f"model.layers.{model.n_layer}.",) if more else ()


def with_their_parameters(model: Model) -> Model:
    """Return `model`, without memory, with all parameters that there are of its kind there.

    GPT-2 always has biases there.
    """
    if not isinstance(model, GPT2):
        return model
    with torch.device("meta"):
        return GPT2(replace(model.args, bias=True))


def their_name(name: str, names: Mapping[str, str]) -> str:
    """Return a parameter's name there: every part of `name` by the table `names`."""
    owner, _, last = name.rpartition(".")
    for dotted in (key for key in names if "." in key and owner.endswith(key)):
        owner = owner.removesuffix(dotted) + names[dotted]
    return ".".join([*(names.get(part, part) for part in owner.split(".")), last])
