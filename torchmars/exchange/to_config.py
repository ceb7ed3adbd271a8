"""The config of a model in Hugging Face's transformers."""

from typing import Any

from torchmars.config.gpt2 import GPT2Args
from torchmars.config.llama import LlamaArgs
from torchmars.core.errors import UserError
from torchmars.exchange.families import KEYS
from torchmars.exchange.names import mixture_kind
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import HIGH, LOW, ORIGINAL_CONTEXT, Llama
from torchmars.models.model import Model

# What all models with such a router have there.
WITH_SOFTMAX = {
    "qkv_bias": False,
    "n_expert_shared": 0,
    "n_dense": 0,
    "routed_scaling": 1.0,
    "rotary_fraction": 1.0,
}
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def to_config(model: Model) -> dict[str, Any]:
    """Return the config.json of `model`, without what concerns its tokenizer.

    Raises `UserError` for a shape that no class of transformers has.
    """
    if type(model) is GPT2:
        return gpt2_config(model)
    if type(model) is Llama:
        return llama_config(model.args)
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


def llama_config(args: LlamaArgs) -> dict[str, Any]:
    if args.n_expert:
        check_mixture(args)
    elif args.rotary_fraction != 1:
        raise UserError(
            "no model of transformers that we know has model.rotary_fraction without experts: such "
            "weights can only be written with --to safetensors"
        )
    if args.qk_norm and args.qkv_bias and not args.n_expert:
        raise UserError(
            "no model of transformers has both model.qk_norm and model.qkv_bias: such weights can "
            "only be written with --to safetensors"
        )
    family = "Qwen3" if args.qk_norm else "Qwen2" if args.qkv_bias else "Llama"
    config: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        **keys_of(family.lower(), args),
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
    """Return what config.json has otherwise where there are experts."""
    kind = mixture_kind(args)
    config = {"model_type": kind, **keys_of(kind, args)}
    if kind == "mixtral":
        return config | {"architectures": ["MixtralForCausalLM"], "sliding_window": None}
    if kind == "qwen3_moe":
        return config | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config | {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": args.qk_norm,
        "partial_rotary_factor": args.rotary_fraction,
        "num_nextn_predict_layers": 0,
    }


def keys_of(kind: str, args: GPT2Args | LlamaArgs) -> dict[str, Any]:
    """Return the settings that have a key there, by it."""
    ours = vars(args)
    if isinstance(args, LlamaArgs):
        ours = ours | {"head_dim": args.head_width, "n_expert_inner": args.expert_width}
    return {theirs: ours[name] for name, theirs in KEYS[kind].items()}


def rope_scaling(factor: float) -> dict[str, Any]:
    """Return Llama 3.1's scaling of rotary positions as config.json has it."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
