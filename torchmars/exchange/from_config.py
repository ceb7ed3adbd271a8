"""The settings that a config of Hugging Face's transformers stands for."""

from collections.abc import Mapping
from typing import Any

from torchmars.core.errors import UserError
from torchmars.exchange.families import ALIASES, DEFAULTS, KEYS, READ_AS
from torchmars.exchange.patterns import patterns_of
from torchmars.exchange.rope import rope_by_type, rope_of, rope_table
from torchmars.exchange.to_config import GPT2_ACTIVATIONS
from torchmars.exchange.values import number, require_all, whole_number

BEGIN = "bos_token_id"


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] of a config.json, and its `seq_len` beside it.

    A key that is not there has the default of the model's class. Raises `UserError` for a model
    that our families do not cover.
    """
    kind = config.get("model_type")
    kind = READ_AS.get(kind, kind) if isinstance(kind, str) else None
    if config.get("index_topk") is not None:
        raise UserError(
            f"its index_topk is {config['index_topk']!r}: attention by an indexer, which lets a "
            "token see some of those before it, is not here"
        )
    if kind not in DEFAULTS:
        raise UserError(
            f"its model_type is {config.get('model_type')!r}: models of "
            f"{', '.join([*DEFAULTS, *READ_AS])} can be imported"
        )
    if config.get("quantization_config") is not None:
        raise UserError(
            "its weights are quantised, as its quantization_config says: fetch the model in "
            "bfloat16, or dequantise and save it"
        )
    if config.get("text_config") is not None:
        raise UserError("its text_config makes it more than a model of text: export that alone")
    if config.get("is_causal", True) is not True:
        raise UserError(
            f"its is_causal is {config['is_causal']}: tokens see later ones there, and never here"
        )
    if (file := config.get("transformers_weights")) is not None:
        raise UserError(
            f"its transformers_weights names {file!r}: name that file model.safetensors, and "
            "leave the key out"
        )
    try:
        return READERS.get(kind, from_llama)(with_defaults({**config, "model_type": kind}))
    except KeyError as error:
        raise UserError(f"its config.json lacks {error}") from None


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with each key that is read, each under one name. Raises `UserError`."""
    kind = config["model_type"]
    whole = {**DEFAULTS[kind], **config}
    given = dict(config)
    for other, name in ALIASES.get(kind, {}).items():
        if config.get(other) is not None:
            whole[name] = whole_number(config, other)
            if given.setdefault(name, whole[name]) != whole[name]:
                raise UserError(
                    f"its {other} is {whole[name]}, and its {name}, which is the same, "
                    f"{given[name]!r}: leave the right one"
                )
    return whole


def left_to_class(config: Mapping[str, Any]) -> list[str]:
    """Return the sizes that a config.json leaves to the defaults of its class."""
    kind = READ_AS.get(config["model_type"], config["model_type"])
    given = {BEGIN, *config, *(ALIASES.get(kind, {}).get(name) for name in config)}
    return [
        name for name, value in DEFAULTS[kind].items() if type(value) is int and name not in given
    ]


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
    return shape_of(config) | {
        "name": "gpt2",
        "bias": True,
        "activation": activations[config["activation_function"]],
        "scale_attn_by_inverse_layer_idx": config["scale_attn_by_inverse_layer_idx"],
    }


def from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    require_all(
        config,
        hidden_act=["silu", "swish"],
        attention_bias=[False, True] if config["model_type"] == "glm4_moe" else [False],
        mlp_bias=[False],
        use_sliding_window=[False, True],
        tie_word_embeddings=[False, True],
    )
    heads, width = (whole_number(config, name) for name in ("num_attention_heads", "hidden_size"))
    # Where these are null, they follow from the others.
    given = {"num_key_value_heads": heads, "head_dim": width // heads}
    given = {name: value for name, value in given.items() if config[name] is None}
    patterns, olmo = patterns_of(config), config["model_type"] == "olmo3"
    norms = {"qk_norm": True, "qk_norm_whole": True, "post_norms": True}
    return {
        "name": "llama",
        "qk_norm": config["model_type"] in ("qwen3", "qwen3_moe"),
        "qkv_bias": config["model_type"] == "qwen2",
        "tied": config["tie_word_embeddings"],
        **(rope_by_type(config, patterns) | norms if olmo else rope_of(config)),
        **patterns,
        **shape_of({**config, **given}),
    }


def from_qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    require_all(
        config,
        decoder_sparse_step=[1],
        mlp_only_layers=[None, []],
        norm_topk_prob=[False, True],
    )
    return from_llama(config)


def from_mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    return from_llama(config) | {"norm_topk_prob": True}


def from_glm(config: Mapping[str, Any]) -> dict[str, Any]:
    require_all(
        config,
        n_group=[1],
        topk_group=[1],
        use_qk_norm=[False, True],
        norm_topk_prob=[False, True],
    )
    return from_llama(config) | {
        "router": "sigmoid",
        "qk_norm": config["use_qk_norm"],
        "rotary_fraction": number(rope_table(config), "partial_rotary_factor"),
    }


def from_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    require_all(
        config,
        hidden_act=["silu", "swish"],
        attention_bias=[False],
        tie_word_embeddings=[False, True],
        rope_interleave=[False, True],
        norm_topk_prob=[False, True],
        # Those of the remote code in published folders.
        moe_layer_freq=[1],
        scoring_func=["sigmoid"],
        topk_method=["noaux_tc"],
    )
    # Null, there are none of them.
    given = {"q_lora_rank": 0} if config["q_lora_rank"] is None else {}
    found = {
        "name": "deepseek",
        "router": "sigmoid",
        "tied": config["tie_word_embeddings"],
        **rope_of(config),
        **shape_of({**config, **given}),
    }
    table = rope_table(config)
    if found["rope_scaling_factor"] != 1 and table.get("mscale_all_dim"):
        found["rope_logit_factor"] = number(table, "mscale_all_dim")
    if config["model_type"] == "glm4_moe_lite":
        found["n_dense"] = dense_blocks(config)
    if found["n_dense"] >= found["n_layer"]:  # there are no experts
        none = {"n_expert": 0, "n_dense": 0, "n_expert_shared": 0, "routed_scaling": 1.0}
        return found | none | {"n_group": 1, "topk_group": 1, "router": "softmax"}
    return found


def dense_blocks(config: Mapping[str, Any]) -> int:
    """Return how many first blocks of a GLM-4.7-Flash are dense. Raises `UserError`."""
    types, layers = config["mlp_layer_types"], whole_number(config, "num_hidden_layers")
    if types is None:  # files of transformers 4 say it so
        return whole_number({"first_k_dense_replace": 1, **config}, "first_k_dense_replace", 0)
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UserError(
            f"its mlp_layer_types are {types!r}: only models whose first blocks are dense, and all "
            "others sparse, can be imported"
        )
    return dense


READERS = {
    "gpt2": from_gpt2,
    "qwen3_moe": from_qwen3_moe,
    "mixtral": from_mixtral,
    "glm4_moe": from_glm,
    "deepseek_v3": from_deepseek,
    "glm4_moe_lite": from_deepseek,
}


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a key there. Those that are true or false are checked."""
    kind, found = config["model_type"], {}
    for ours, name in KEYS[kind].items():
        theirs = ALIASES.get(kind, {}).get(name, name)
        default = DEFAULTS[kind][theirs]
        if isinstance(default, bool):
            found[ours] = config[theirs]
        elif isinstance(default, float):
            found[ours] = number(config, theirs)
        else:
            least = 0 if ours in ("n_dense", "q_lora_rank") else 1
            found[ours] = whole_number(config, theirs, least)
    return found
