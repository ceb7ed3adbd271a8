"""The models of Hugging Face's transformers that are read: their names, and their defaults.

A key that config.json leaves out has the default of the model's class there, which differs from
class to class. Source: the classes `XConfig` of transformers 5.24; a test compares them.
"""

from typing import Any

_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # the width over the heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "bos_token_id": 1,
}
_QWEN = _LLAMA | {
    "bos_token_id": None,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,  # null unless use_sliding_window
}
_WINDOWS = {"max_window_layers": 28, "layer_types": None}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
# By the model_type of config.json. `rope_theta` and `partial_rotary_factor` are in its table
# `rope_parameters`, or beside it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
    },
    "llama": _LLAMA | {"mlp_bias": False},
    "mistral": _MISTRAL,
    "ministral": _MISTRAL | {"layer_types": None},
    "smollm3": _LLAMA
    | {
        "bos_token_id": 128_000,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,  # as no_rope_layer_interval says
        "no_rope_layer_interval": 4,
    },
    "olmo3": _LLAMA
    | {
        "vocab_size": 50_304,
        "bos_token_id": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "layer_types": None,  # every fourth is full
    },
    "qwen2": _QWEN | _WINDOWS,
    "qwen3": _QWEN | _WINDOWS | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "glm4_moe": _LLAMA
    | {
        "vocab_size": 151_552,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": None,
        "use_qk_norm": False,
    },
}
_DEEPSEEK = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
DEFAULTS["deepseek_v3"] = _DEEPSEEK | {
    "vocab_size": 129_280,
    "bos_token_id": 0,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "head_dim": 64,  # of the part that is rotated: not read
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
}
DEFAULTS["glm4_moe_lite"] = {
    name: value
    for name, value in DEFAULTS["deepseek_v3"].items()
    if name not in ("head_dim", "first_k_dense_replace")
} | {
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": None,  # the first is dense, where first_k_dense_replace does not say more
}
# Kinds that transformers does not know, whose files are as those of another.
READ_AS = {"kimi_k2": "deepseek_v3"}
# The keys there of our settings, in the order of config.json, by its model_type.
_SHAPE = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_MIXTURE = _SHAPE | {
    "n_expert_used": "num_experts_per_tok",
    "n_expert_inner": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
KEYS: dict[str, dict[str, str]] = {
    "gpt2": {
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "seq_len": "n_positions",
        "vocab_size": "vocab_size",
    },
    "llama": _SHAPE,
    "mistral": _SHAPE,
    "ministral": _SHAPE,
    "smollm3": _SHAPE,
    "olmo3": _SHAPE,
    "qwen2": _SHAPE,
    "qwen3": _SHAPE,
    "qwen3_moe": _MIXTURE | {"n_expert": "num_experts"},
    "mixtral": _SHAPE
    | {
        "n_expert_used": "num_experts_per_tok",
        "n_expert": "num_local_experts",
        "n_expert_inner": "intermediate_size",
    },
    "glm4_moe": _MIXTURE
    | {
        "n_expert": "n_routed_experts",
        "n_expert_shared": "n_shared_experts",
        "routed_scaling": "routed_scaling_factor",
        "n_dense": "first_k_dense_replace",
        "qkv_bias": "attention_bias",
    },
}
_LATENT = {
    name: theirs for name, theirs in _MIXTURE.items() if name not in ("n_kv_head", "head_dim")
} | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_interleave": "rope_interleave",
    "n_expert": "n_routed_experts",
    "n_expert_shared": "n_shared_experts",
    "routed_scaling": "routed_scaling_factor",
    "n_group": "n_group",
    "topk_group": "topk_group",
}
KEYS["deepseek_v3"] = _LATENT | {"n_dense": "first_k_dense_replace"}
KEYS["glm4_moe_lite"] = _LATENT
# The names of the models, by their model_type.
TITLES = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "smollm3": "SmolLM3",
    "olmo3": "OLMo 3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "glm4_moe": "GLM-4.5",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe_lite": "GLM-4.7-Flash",
}
*_FIRST, _LAST = TITLES.values()
IN_WORDS = f"{', '.join(_FIRST)} and {_LAST}"
# Other names of a key there. Which of those of the experts is written depends on the version.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "qwen3_moe": {name: "num_local_experts" for name in _EXPERTS},
    "mixtral": {name: "num_local_experts" for name in _EXPERTS},
    "glm4_moe": {name: "n_routed_experts" for name in _EXPERTS},
    "deepseek_v3": {name: "n_routed_experts" for name in _EXPERTS},
    "glm4_moe_lite": {name: "n_routed_experts" for name in _EXPERTS}
    | {"head_dim": "qk_rope_head_dim"},
}
