"""The config of a model in Hugging Face's transformers."""

from collections.abc import Callable
from typing import Any

from torchmars.config.decoder import DecoderArgs
from torchmars.config.gpt2 import GPT2Args
from torchmars.config.llama import LlamaArgs
from torchmars.core.errors import UserError
from torchmars.exchange.families import KEYS
from torchmars.exchange.names import mixture_kind
from torchmars.exchange.patterns import check_patterns, pattern_config
from torchmars.exchange.rope import nested_rope, rope_config
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama
from torchmars.models.model import Model

# What all models with such a router have there.
WITH_SOFTMAX = {
    "qkv_bias": False,
    "n_expert_shared": 0,
    "n_dense": 0,
    "routed_scaling": 1.0,
    "rotary_fraction": 1.0,
}
# The names of transformers' classes, without their end.
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "smollm3": "SmolLM3",
    "olmo3": "Olmo3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "glm4_moe": "Glm4Moe",
}
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def to_config(model: Model) -> dict[str, Any]:
    """Return the config.json of `model`, without what concerns its tokenizer.

    Raises `UserError` for a shape that no class of transformers has.
    """
    if type(model) in WRITERS:
        return WRITERS[type(model)](model)
    raise UserError(
        f"transformers has no {type(model).__name__}: export it to a file that ends in .safetensors"
    )


def gpt2_config(model: GPT2) -> dict[str, Any]:
    args = model.args
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **keys_of("gpt2", args),
        "activation_function": GPT2_ACTIVATIONS[args.activation],
        "scale_attn_by_inverse_layer_idx": args.scale_attn_by_inverse_layer_idx,
        "layer_norm_epsilon": model.norm.eps,
        "resid_pdrop": args.dropout,
        "embd_pdrop": args.dropout,
        "attn_pdrop": args.dropout,
        "tie_word_embeddings": True,
    }


def llama_config(model: Llama) -> dict[str, Any]:
    args = model.args
    if args.n_expert:
        check_mixture(args)
    elif args.rotary_fraction != 1:
        raise UserError(
            "no model of transformers that we know has model.rotary_fraction without experts: such "
            "weights can only be written with --to safetensors"
        )
    if args.post_norms != args.qk_norm_whole or (args.post_norms and args.n_expert):
        raise UserError(
            "OLMo 3 of transformers has both model.post_norms and model.qk_norm_whole, and no "
            "experts: such weights can only be written with --to safetensors"
        )
    if args.qk_norm and args.qkv_bias and not args.n_expert:
        raise UserError(
            "no model of transformers has both model.qk_norm and model.qkv_bias: such weights can "
            "only be written with --to safetensors"
        )
    kind = mixture_kind(args) if args.n_expert else dense_kind(args)
    check_patterns(kind, args)
    config: dict[str, Any] = {
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        **keys_of(kind, args),
        **(nested_rope(args) if kind == "olmo3" else rope_config(args)),
        "hidden_act": "silu",
        "tie_word_embeddings": args.tied,
        **pattern_config(kind, args),
    }
    return {"attention_bias": False} | config | (mixture_config(args) if args.n_expert else {})


def dense_kind(args: LlamaArgs) -> str:
    """Return transformers' name for the kind of a model without experts."""
    if args.post_norms:
        return "olmo3"
    if args.qk_norm or args.qkv_bias:
        return "qwen3" if args.qk_norm else "qwen2"
    if "n" in map(args.rope_letter, range(args.n_layer)):
        return "smollm3"
    windows = {args.window_of(number) for number in range(args.n_layer)}
    return "ministral" if len(windows) > 1 else "llama" if windows == {None} else "mistral"


def check_mixture(args: LlamaArgs) -> None:
    """Raise `UserError` for experts that no class of transformers has."""
    others = {} if args.router == "sigmoid" else WITH_SOFTMAX
    for name, value in others.items():
        if (ours := getattr(args, name)) != value:
            raise UserError(
                f"no model of transformers that we know has a softmax router of experts and "
                f"model.{name} = {ours}: such weights can only be written with --to safetensors"
            )
    kind = mixture_kind(args)
    if kind == "mixtral" and not args.norm_topk_prob:
        raise UserError(
            "Mixtral has model.norm_topk_prob = true, and model.qk_norm is of Qwen3: such weights "
            "can only be written with --to safetensors"
        )
    if kind == "glm4_moe" and not args.n_expert_shared:
        raise UserError(
            'GLM-4.5 has model.n_expert_shared, and model.router = "sigmoid" is of GLM-4.5: such '
            "weights can only be written with --to safetensors"
        )


def mixture_config(args: LlamaArgs) -> dict[str, Any]:
    """Return what config.json has besides where there are experts."""
    kind = mixture_kind(args)
    if kind == "mixtral":
        return {}
    if kind == "qwen3_moe":
        return {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": args.qk_norm,
        "partial_rotary_factor": args.rotary_fraction,
        "num_nextn_predict_layers": 0,
    }


def deepseek_config(model: Deepseek) -> dict[str, Any]:
    args = model.args
    if args.n_expert and not (args.n_expert_shared and args.router == "sigmoid"):
        raise UserError(
            'DeepSeek-V3 has model.router = "sigmoid" and model.n_expert_shared: such weights can '
            "only be written with --to safetensors"
        )
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **keys_of("deepseek_v3", args),
        "q_lora_rank": args.q_lora_rank or None,
        "num_key_value_heads": args.n_head,  # where there are fewer, transformers repeats heads
        **rope_config(args),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": args.tied,
        "num_nextn_predict_layers": 0,
    }
    if not args.n_expert:
        # All blocks are dense, and the rest describes experts that no block has.
        config |= {"first_k_dense_replace": args.n_layer, "n_shared_experts": 1}
        config |= {"n_routed_experts": args.n_expert_used}
    if args.rope_logit_factor and "rope_scaling" in config:
        table = {"mscale_all_dim": args.rope_logit_factor}
        if args.rope_attention_factor == 1:  # as other programs want it said
            table["mscale"] = args.rope_logit_factor
        config["rope_scaling"] |= table
    return config


def keys_of(kind: str, args: GPT2Args | DecoderArgs) -> dict[str, Any]:
    """Return the settings that have a key there, by it."""
    ours = vars(args)
    if isinstance(args, DecoderArgs):
        ours = ours | {"n_expert_inner": args.expert_width}
    if isinstance(args, LlamaArgs):
        ours = ours | {"head_dim": args.head_width}
    return {theirs: ours[name] for name, theirs in KEYS[kind].items()}


# By the class of a model. A plugin's class enters its own, as it enters the other way in READERS.
WRITERS: dict[type[Model], Callable[[Any], dict[str, Any]]] = {
    GPT2: gpt2_config,
    Llama: llama_config,
    Deepseek: deepseek_config,
}
