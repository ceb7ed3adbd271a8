"""The DeepSeek family in Hugging Face's transformers: DeepSeek-V3, and GLM-4.7-Flash to be read."""

from collections.abc import Mapping
from typing import Any

from torchmars.core.errors import UserError
from torchmars.exchange.family import ModelKind, keys_of, number, shape_of
from torchmars.exchange.llama_family import (
    ALLOWED,
    EITHER,
    MIXTURE,
    REMEDY,
    ROPE,
    SIGMOID,
    LlamaFamily,
    rope_config,
    rope_of,
)
from torchmars.models.deepseek import Deepseek

KEYS = {ours: name for ours, name in MIXTURE.items() if ours not in ("n_kv_head", "head_dim")}
OWN = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave"
KEYS |= SIGMOID | {name: name for name in (*OWN.split(), "n_group", "topk_group")}
DENSE = "first_k_dense_replace"
REQUIRED = ALLOWED | {"rope_interleave": EITHER, "norm_topk_prob": EITHER}
# Those of the remote code in published folders.
REQUIRED |= {"moe_layer_freq": [1], "scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]}


class DeepseekFamily(LlamaFamily):
    """The models that are a DeepSeek here."""

    model = Deepseek
    kinds = {
        "deepseek_v3": ModelKind(KEYS | {"n_dense": DENSE}, REQUIRED, ROPE),
        "glm4_moe_lite": ModelKind(KEYS, REQUIRED, (*ROPE, "mlp_layer_types", DENSE)),
    }

    def section(self, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        config = {**config, "q_lora_rank": config["q_lora_rank"] or 0}  # null: there are none
        found = {
            "name": "deepseek",
            "router": "sigmoid",
            **rope_of(kind, config),
            **shape_of(self.kinds[kind], config),
        }
        table = config["rope_parameters"]
        if found["rope_scaling_factor"] != 1 and table.get("mscale_all_dim"):
            found["rope_logit_factor"] = number(table, "mscale_all_dim")
        if kind == "glm4_moe_lite":
            found["n_dense"] = dense_blocks(config)
        if found["n_dense"] >= found["n_layer"]:  # there are no experts
            found |= {"n_expert": 0, "n_dense": 0, "n_expert_shared": 0, "routed_scaling": 1.0}
            found |= {"n_group": 1, "topk_group": 1, "router": "softmax"}
        return found

    def config(self, model: Any) -> dict[str, Any]:
        args = model.args
        if args.n_expert and not (args.n_expert_shared and args.router == "sigmoid"):
            has = 'model.router = "sigmoid" and model.n_expert_shared'
            raise UserError(f"DeepSeek-V3 has {has}: {REMEDY}")
        found = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **keys_of(self.kinds["deepseek_v3"], args),
            "q_lora_rank": args.q_lora_rank or None,
            "num_key_value_heads": args.n_head,  # where there are fewer, transformers repeats heads
            **rope_config(args),
            "num_nextn_predict_layers": 0,
        }
        if not args.n_expert:
            # All blocks are dense, and the rest describes experts that no block has.
            found |= {DENSE: args.n_layer, "n_shared_experts": 1}
            found |= {"n_routed_experts": args.n_expert_used}
        if args.rope_logit_factor and "rope_scaling" in found:
            table = {"mscale_all_dim": args.rope_logit_factor}
            if args.rope_attention_factor == 1:  # as other programs want it said
                table["mscale"] = args.rope_logit_factor
            found["rope_scaling"] |= table
        return found


def dense_blocks(config: Mapping[str, Any]) -> int:
    """Return how many first blocks of a GLM-4.7-Flash are dense. Raises `UserError`."""
    types = config["mlp_layer_types"]
    if types != sorted(types):  # "dense" comes first
        raise UserError(
            f"its mlp_layer_types are {types!r}: only models whose first blocks are dense, and all "
            "others sparse, can be imported"
        )
    dense: int = types.count("dense")
    # Its class has one by default, and does not know how files of transformers 4 say it.
    return number(config, DENSE) if dense == 1 and DENSE in config else dense
