"""Small models of transformers, of each kind that is read here, with random weights."""

from functools import cache

import torch

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = SHAPE | {"num_experts_per_tok": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
LATENT = EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 24}
LATENT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12}
KINDS = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32},
    "llama": SHAPE,
    "mistral": SHAPE | {"sliding_window": 5},
    "ministral": SHAPE | {"sliding_window": 5, "layer_types": [FULL, SLIDING], "head_dim": 16},
    "olmo3": SHAPE | {"sliding_window": 5, "layer_types": [FULL, SLIDING]},
    "smollm3": SHAPE | {"no_rope_layer_interval": 2, "pad_token_id": None},
    "qwen2": SHAPE,
    "qwen3": SHAPE | {"head_dim": 16},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "glm4_moe": EXPERTS
    | {"n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "use_qk_norm": True},
}


def randomised(model, spread=0.3):
    """Fill a model, of theirs or ours, with weights so large that a difference is seen."""
    generator = torch.Generator().manual_seed(0)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and "inv_freq" not in name:
            norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
            torch.nn.init.normal_(value, float(norm), spread, generator)
    return model.eval()


@cache
def model_of(kind, tied=False):
    """A model of a kind, with 260 tokens. It is shared: nobody may change it."""
    import transformers

    tie = {} if kind == "gpt2" else {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(kind, vocab_size=260, **KINDS[kind], **tie)
    return randomised(transformers.AutoModelForCausalLM.from_config(config))
