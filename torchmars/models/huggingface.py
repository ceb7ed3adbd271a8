"""The names, shapes and configs of the same models in Hugging Face's transformers, both ways."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchmars.core.errors import UserError
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import HIGH, LOW, ORIGINAL_CONTEXT, Llama, LlamaArgs
from torchmars.models.model import Model

# What each part of a name is called there. A dotted name stands for itself before its parts.
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
    **{name: f"{name}_proj" for name in ("q", "k", "v", "gate", "up")},
}
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
# Both of them as transformers 5 holds them, and saves them without save_original_format.
GATE_UP = "mlp.experts.gate_up_proj"
FUSED_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.gate": GATE_UP,
    "mlp.experts.up": GATE_UP,
    "mlp.experts.proj": "mlp.experts.down_proj",
}
MIXTURES = ("qwen3_moe", "mixtral")
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


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
    """Return the tensor there of each parameter of `model`, by our name.

    GPT-2's layers there hold their weights as [in, out]. `fused`: experts are as transformers 5
    holds them, in stacks; otherwise each matrix is a tensor, as in most files.
    """
    if isinstance(model, Llama) and model.args.n_expert:
        return mixture_counterparts(model, fused)
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    names, transpose = (
        (GPT2_NAMES, linear) if isinstance(model, GPT2) else (LLAMA_NAMES, frozenset[str]())
    )
    return {
        name: Counterpart(their_name(name, names), name in transpose)
        for name, _ in model.named_parameters()
    }


def mixture_counterparts(model: Llama, fused: bool) -> dict[str, Counterpart]:
    """Return the counterparts of a model with experts."""
    names = FUSED_NAMES if fused else QWEN3_MOE_NAMES if model.args.qk_norm else MIXTRAL_NAMES
    found = {}
    for name, _ in model.named_parameters():
        end = name[name.find("mlp.") :]
        if end not in names:
            found[name] = Counterpart(their_name(name, LLAMA_NAMES))
            continue
        there = their_name(name.removesuffix(end), LLAMA_NAMES) + names[end]
        half = ("gate", "up").index(end.split(".")[-1]) if names[end] == GATE_UP else None
        experts = model.args.n_expert if "*" in there else 0
        found[name] = Counterpart(there, experts=experts, half=half)
    return found


def with_their_parameters(model: Model) -> Model:
    """Return `model`, without memory, with all parameters that there are of its kind there.

    GPT-2 always has biases there.
    """
    if not isinstance(model, GPT2):
        return model
    with torch.device("meta"):
        return GPT2(replace(model.args, bias=True))


def their_name(name: str, names: Mapping[str, str]) -> str:
    """Return what a parameter is called there: every part of `name` by the table `names`."""
    owner, _, last = name.rpartition(".")
    for dotted in (key for key in names if "." in key and owner.endswith(key)):
        owner = owner.removesuffix(dotted) + names[dotted]
    return ".".join([*(names.get(part, part) for part in owner.split(".")), last])


def to_config(model: Model) -> dict[str, Any]:
    """Return the config.json of `model`, without what concerns its tokenizer.

    Raises `UserError` for a shape that no class of transformers has.
    """
    if isinstance(model, GPT2):
        return gpt2_config(model)
    assert isinstance(model, Llama)
    return llama_config(model.args)


def gpt2_config(model: GPT2) -> dict[str, Any]:
    args = model.args
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": args.n_layer,
        "n_head": args.n_head,
        "n_embd": args.n_embd,
        "n_positions": args.seq_len,
        "vocab_size": args.vocab_size,
        "activation_function": GPT2_ACTIVATIONS[args.activation],
        "scale_attn_by_inverse_layer_idx": args.scale_attn_by_inverse_layer_idx,
        "layer_norm_epsilon": model.norm.eps,
        "resid_pdrop": args.dropout,
        "embd_pdrop": args.dropout,
        "attn_pdrop": args.dropout,
        "tie_word_embeddings": True,
    }


def llama_config(args: LlamaArgs) -> dict[str, Any]:
    if args.n_expert and args.qkv_bias:
        raise UserError(
            "no model of transformers that we know has both experts and model.qkv_bias: such "
            "weights can only be written with --to safetensors"
        )
    if args.n_expert and not args.qk_norm and not args.norm_topk_prob:
        raise UserError(
            "Mixtral has model.norm_topk_prob = true, and model.qk_norm is of Qwen3: such weights "
            "can only be written with --to safetensors"
        )
    if args.qk_norm and args.qkv_bias:
        raise UserError(
            "no model of transformers has both model.qk_norm and model.qkv_bias: such weights can "
            "only be written with --to safetensors"
        )
    family = "Qwen3" if args.qk_norm else "Qwen2" if args.qkv_bias else "Llama"
    config: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "num_hidden_layers": args.n_layer,
        "num_attention_heads": args.n_head,
        "num_key_value_heads": args.n_kv_head,
        "head_dim": args.head_width,
        "hidden_size": args.n_embd,
        "intermediate_size": args.n_inner,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": args.tied,
    }
    if args.n_expert:
        config |= mixture_config(args)
    if args.rope_scaling_factor != 1.0:
        config["rope_scaling"] = rope_scaling(args.rope_scaling_factor)
    return config


def mixture_config(args: LlamaArgs) -> dict[str, Any]:
    """Return what config.json has otherwise where there are experts."""
    inner = args.n_expert_inner or args.n_inner
    if not args.qk_norm:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": args.n_expert,
            "num_experts_per_tok": args.n_expert_used,
            "intermediate_size": inner,
            "sliding_window": None,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": args.n_expert,
        "num_experts_per_tok": args.n_expert_used,
        "moe_intermediate_size": inner,
        "norm_topk_prob": args.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def rope_scaling(factor: float) -> dict[str, Any]:
    """Return Llama 3.1's scaling of rotary positions as config.json has it."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] of a config.json, and its `seq_len` beside it.

    Raises `UserError` for a model that our families do not cover.
    """
    readers = {"gpt2": from_gpt2, "llama": from_llama, "qwen2": from_llama, "qwen3": from_llama}
    readers |= dict.fromkeys(MIXTURES, from_mixture)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in readers:
        raise UserError(
            f"its model_type is {kind!r}: models of {', '.join(readers)} can be imported"
        )
    try:
        return readers[kind](config)
    except KeyError as error:
        raise UserError(f"its config.json lacks {error}") from None


def from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    activations = {theirs: ours for ours, theirs in GPT2_ACTIVATIONS.items()}
    width = whole_number(config, "n_embd")
    require_all(
        config,
        activation_function=[*activations],
        n_inner=[None, 4 * width],
        layer_norm_epsilon=[1e-5],
        tie_word_embeddings=[True],
        scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False, True],
        add_cross_attention=[False],
    )
    return {
        "name": "gpt2",
        "n_layer": whole_number(config, "n_layer"),
        "n_head": whole_number(config, "n_head"),
        "n_embd": width,
        "vocab_size": whole_number(config, "vocab_size"),
        "bias": True,
        "activation": activations[config.get("activation_function", "gelu_new")],
        "scale_attn_by_inverse_layer_idx": config.get("scale_attn_by_inverse_layer_idx", False),
        "seq_len": whole_number(config, "n_positions"),
    }


def from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_of(config)
    require_all(
        config,
        hidden_act=["silu"],
        attention_bias=[False],
        mlp_bias=[False],
        use_sliding_window=[False],
        tie_word_embeddings=[False, True],
    )
    heads, width = (whole_number(config, name) for name in ("num_attention_heads", "hidden_size"))
    # Where these are null, they follow from the others.
    given = {"num_key_value_heads": heads, "head_dim": width // heads}
    given |= {name: whole_number(config, name) for name in given if config.get(name) is not None}
    return {
        "name": "llama",
        "n_layer": whole_number(config, "num_hidden_layers"),
        "n_head": heads,
        "n_kv_head": given["num_key_value_heads"],
        "head_dim": given["head_dim"],
        "n_embd": width,
        "n_inner": whole_number(config, "intermediate_size"),
        "vocab_size": whole_number(config, "vocab_size"),
        "rope_theta": number(rope, "rope_theta"),
        "rope_scaling_factor": number(rope, "factor"),
        "norm_eps": number(config, "rms_norm_eps"),
        "qk_norm": config["model_type"] in ("qwen3", "qwen3_moe"),
        "qkv_bias": config["model_type"] == "qwen2",
        "tied": config.get("tie_word_embeddings", False),
        "seq_len": whole_number(config, "max_position_embeddings"),
    }


def from_mixture(config: Mapping[str, Any]) -> dict[str, Any]:
    mixtral = config["model_type"] == "mixtral"
    if mixtral:
        require_all(config, sliding_window=[None])
    else:
        require_all(
            config,
            decoder_sparse_step=[1],
            mlp_only_layers=[None, []],
            norm_topk_prob=[False, True],
        )
    # Which of the two names is written depends on the version.
    number_of = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    inner = "intermediate_size" if mixtral else "moe_intermediate_size"
    return from_llama(config) | {
        "n_expert": whole_number(config, number_of),
        "n_expert_used": whole_number(config, "num_experts_per_tok"),
        "n_expert_inner": whole_number(config, inner),
        "norm_topk_prob": mixtral or bool(config.get("norm_topk_prob", False)),
    }


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, and the `factor` of Llama 3.1's scaling, of rotary positions.

    The factor is 1 where there is no scaling. transformers 5 writes both as `rope_parameters`,
    older versions as `rope_theta` and `rope_scaling`. Raises `UserError` for another scaling.
    """
    tables = [config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    more = tables[0] if tables else {}
    if not isinstance(more, dict):
        raise UserError(f"its rotary positions are {more!r}, which is no table")
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **more}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_all({**config, **rope}, partial_rotary_factor=[None, 1.0])
    if kind == "default":
        return {"rope_theta": rope["rope_theta"], "factor": 1.0}
    if kind != "llama3" or rope | rope_scaling(rope["factor"]) != rope:
        raise UserError(
            f"its rotary positions are scaled by {rope}: only Llama 3.1's scaling can be imported"
        )
    return rope


def require_all(config: Mapping[str, Any], **allowed: list[Any]) -> None:
    """Raise `UserError` for a setting with a value that our families do not cover.

    One that is not there is as ours by default. One that is null need not be.
    """
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            known = ", ".join(repr(value) for value in values if value is not None) or "null"
            raise UserError(
                f"its {name} is {config[name]!r}: only models with {known} can be imported"
            )


def whole_number(config: Mapping[str, Any], name: str) -> int:
    """Return a setting that is reckoned with. Raises `UserError` if it is no number above 0."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"its {name} is {value!r}: it must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], name: str) -> float:
    """Return a setting that is a number. Raises `UserError` if it is none."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"its {name} is {value!r}: it must be a number")
    return value
