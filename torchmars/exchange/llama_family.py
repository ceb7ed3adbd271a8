"""The Llama family in Hugging Face's transformers: Llama, Mistral, Qwen, OLMo 3, GLM-4.5 and more.

A class there has fixed what is a setting here: `FEATURES` says which.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchmars.config.llama import LlamaArgs
from torchmars.config.model_args import DecoderArgs
from torchmars.core.errors import UserError
from torchmars.exchange.family import (
    Counterpart,
    Family,
    ModelKind,
    keys_of,
    number,
    require_all,
    shape_of,
    their_name,
)
from torchmars.models.llama import Llama
from torchmars.models.model import Model
from torchmars.models.rotary import HIGH, LOW

ORIGINAL = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)
# The keys of each way to scale rotary positions. Those of YaRN alone may be left out.
OF_YARN = {"rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow"}
OF_YARN |= {"rope_attention_factor": "attention_factor"}
STRETCHED = {"rope_scaling_factor": "factor"}
LONGER = STRETCHED | {"rope_original_len": ORIGINAL}
SCALED_BY = {"linear": STRETCHED, "llama3": LONGER, "yarn": LONGER | OF_YARN}
WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
READS = (*ROPE, *WINDOWS, "no_rope_layers", "no_rope_layer_interval")
SHAPE = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "n_inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
MIXTURE = SHAPE | {
    "n_expert_used": "num_experts_per_tok",
    "n_expert_inner": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
SIGMOID = {
    "n_expert": "n_routed_experts",
    "n_expert_shared": "n_shared_experts",
    "routed_scaling": "routed_scaling_factor",
}
EITHER = (False, True)
ALLOWED: dict[str, Sequence[Any]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": [False],
    "mlp_bias": [False],
    "use_sliding_window": EITHER,
    "tie_word_embeddings": EITHER,
}
# What models of a kind always have that a plain Llama has not, and what they may have. The first
# kind that fits a model is its own.
BY_BLOCK = {"window", "window_blocks"}
WITHOUT, UNSCALED = 'rope_blocks with "n"', 'rope_blocks with "u"'
FEATURES: dict[str, tuple[set[str], set[str]]] = {
    "llama": (set(), set()),
    "mistral": (set(), {"window"}),
    "ministral": (set(), BY_BLOCK),
    "smollm3": (set(), BY_BLOCK | {WITHOUT}),
    "olmo3": ({"qk_norm", "qk_norm_whole", "post_norms"}, BY_BLOCK | {UNSCALED}),
    "qwen2": ({"qkv_bias"}, BY_BLOCK),
    "qwen3": ({"qk_norm"}, BY_BLOCK),
    "qwen3_moe": ({"n_expert", "qk_norm"}, {"window", "norm_topk_prob"}),
    "mixtral": ({"n_expert"}, {"window"}),
    "glm4_moe": (
        {"n_expert", "router", "n_expert_shared"},
        {"qk_norm", "qkv_bias", "n_dense", "routed_scaling", "rotary_fraction", "norm_topk_prob"},
    ),
}
REMEDY = "such weights can only be written with --to safetensors"
SWITCHES = ("qk_norm", "qk_norm_whole", "post_norms", "qkv_bias")  # true where a kind has them
OF_EXPERTS = ("router", "n_expert_shared", "n_dense", "routed_scaling", "norm_topk_prob")
WITH_SWITCH = ("smollm3", "qwen2", "qwen3", "qwen3_moe")  # a window only by use_sliding_window
WINDOW, FULL = "sliding_attention", "full_attention"
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
# Norms that come after attention and MLP.
POST_NORMS = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
# Ends of a mixture's names. "*" stands for the number of an expert.
MATRICES = {"gate": "gate_proj", "up": "up_proj", "proj": "down_proj"}
OF_MIXTURES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.experts.{ours}": f"mlp.experts.*.{name}.weight" for ours, name in MATRICES.items()},
    **{
        f"mlp.shared.{ours}.weight": f"mlp.shared_experts.{name}.weight"
        for ours, name in MATRICES.items()
    },
}
OF_MIXTRAL = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate": "block_sparse_moe.experts.*.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.proj": "block_sparse_moe.experts.*.w2.weight",
}
GATE_UP = "mlp.experts.gate_up_proj"
FUSED = {"mlp.experts.gate": GATE_UP, "mlp.experts.up": GATE_UP}
FUSED |= {"mlp.experts.proj": "mlp.experts.down_proj"}


class LlamaFamily(Family):
    """The models that are a Llama here."""

    model: type[Model] = Llama
    kinds: Mapping[str, ModelKind] = {
        **dict.fromkeys(FEATURES, ModelKind(SHAPE, ALLOWED, READS)),
        # Its class gives all blocks the window, whatever it says of them: that is a Ministral.
        "mistral": ModelKind(SHAPE, ALLOWED | {"layer_types": [None]}, READS),
        "qwen3_moe": ModelKind(
            MIXTURE | {"n_expert": "num_experts"},
            ALLOWED
            | {"decoder_sparse_step": [1], "mlp_only_layers": ([], None), "norm_topk_prob": EITHER},
            READS,
        ),
        "mixtral": ModelKind(
            SHAPE
            | {"n_expert": "num_local_experts", "n_expert_used": "num_experts_per_tok"}
            | {"n_expert_inner": "intermediate_size"},
            ALLOWED,
            READS,
        ),
        "glm4_moe": ModelKind(
            MIXTURE
            | SIGMOID
            | {"n_dense": "first_k_dense_replace", "qkv_bias": "attention_bias"}
            | {"qk_norm": "use_qk_norm"},
            ALLOWED
            | dict.fromkeys(("attention_bias", "use_qk_norm", "norm_topk_prob"), EITHER)
            | {"n_group": [1], "topk_group": [1]},
            READS,
        ),
    }
    names: Mapping[str, str] = LLAMA_NAMES

    def section(self, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        windows = windows_there(kind, config)
        found = {"name": "llama"} | {name: name in FEATURES[kind][0] for name in SWITCHES} | windows
        found |= olmo_rope_of(config, windows) if kind == "olmo3" else rope_of(kind, config)
        if config.get("head_dim") is None:
            width = config["hidden_size"] // number(config, "num_attention_heads", 1)
            config = {**config, "head_dim": width}
        if kind == "glm4_moe":
            fraction = number(config["rope_parameters"], "partial_rotary_factor")
            found |= {"router": "sigmoid", "rotary_fraction": fraction}
        return found | shape_of(self.kinds[kind], config)

    def config(self, model: Any) -> dict[str, Any]:
        args = model.args
        kind = kind_there(args)
        title = {"smollm3": "SmolLM3"}.get(kind, kind.title().replace("_", ""))
        found: dict[str, Any] = {"architectures": [f"{title}ForCausalLM"], "model_type": kind}
        found |= keys_of(self.kinds[kind], args)
        found |= olmo_rope_config(args) if kind == "olmo3" else rope_config(args)
        if kind == "glm4_moe":
            found |= {"partial_rotary_factor": args.rotary_fraction, "num_nextn_predict_layers": 0}
        return found | window_config(kind, args)

    def counterparts(self, model: Any, fused: bool) -> dict[str, Counterpart]:
        args = model.args
        names = {**self.names, **(POST_NORMS if getattr(args, "post_norms", False) else {})}
        mixtral = args.router == "softmax" and not getattr(args, "qk_norm", True)
        ends = OF_MIXTRAL if mixtral else OF_MIXTURES
        ends = (OF_MIXTURES | FUSED if fused else ends) if args.n_expert else {}
        found = {}
        for name in model.state_dict():
            end = name[name.find("mlp.") :]
            there = their_name(name, names)
            if end in ends:
                there = their_name(name.removesuffix(end), names) + ends[end]
            half = ("gate", "up").index(end.split(".")[-1]) if there.endswith(GATE_UP) else None
            found[name] = Counterpart(there, experts=args.n_expert * ("*" in there), half=half)
        return found

    def left_out(self, model: Any) -> tuple[str, ...]:
        """GLM-4.5 and DeepSeek-V3 are published with one more layer, which predicts the token after
        the next one."""
        return (f"model.layers.{model.n_layer}.",) if model.args.router == "sigmoid" else ()


def kind_there(args: LlamaArgs) -> str:
    """Return transformers' name for the kind of a model. Raises `UserError` if there is none."""
    has = features(args)
    for kind, (always, may) in FEATURES.items():
        if always <= has <= always | may:
            return kind
    named = " and ".join(f"model.{name}" for name in sorted(has))
    raise UserError(f"no class of transformers has {named} without more or less: {REMEDY}")


def features(args: LlamaArgs) -> set[str]:
    """Return what a model has that a plain Llama has not, by the settings that ask for it."""
    names = ("n_expert", "rotary_fraction", *SWITCHES, *(OF_EXPERTS if args.n_expert else ()))
    has = {name: getattr(args, name) != getattr(LlamaArgs, name) for name in names}
    windows = [args.window_of(number) for number in range(args.n_layer)]
    letters = [args.rope_letter(number) for number in range(args.n_layer)]
    if args.rope_scaling_factor == 1:  # unscaled ones are as all others then
        letters = [letter.replace("u", "r") for letter in letters]
    pairs = {(window is not None, letter) for window, letter in zip(windows, letters)}
    of_olmo = pairs <= {(True, "u"), (False, "r")}
    has |= {"window": any(windows), "window_blocks": len({*windows}) > 1}
    has |= {WITHOUT: "n" in letters, UNSCALED if of_olmo else "rope_blocks": "u" in letters}
    return {name for name, there in has.items() if there}


def windows_there(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `window`, `window_blocks` and `rope_blocks` of a config.json, where it has some.

    Raises `UserError` for lists that its class would not follow.
    """
    found: dict[str, Any] = {}
    if kind == "smollm3":
        rotates = config["no_rope_layers"]
        if len(rotates) != config["num_hidden_layers"] or {*rotates} - {0, 1}:
            has = "0 and 1 only, one of them for each block"
            raise UserError(f"its no_rope_layers is {rotates!r}: it must have {has}")
        found["rope_blocks"] = shortest("".join("nr"[each] for each in rotates))
    types, may = config.get("layer_types") or [], FEATURES[kind][1]
    known = (FULL, WINDOW) if "window_blocks" in may else [FULL]
    for each in types:
        require_all({"layer_types": each}, {"layer_types": known})
    on = "window" in may and (kind not in WITH_SWITCH or config["use_sliding_window"])
    if not on or config.get("sliding_window") is None:
        if WINDOW in types:
            raise UserError(f"its layer_types has {WINDOW!r}, and its window is off or null")
        return found
    slides = "".join("fs"[each == WINDOW] for each in types) or "s"
    if "s" in slides:
        window = number(config, "sliding_window", 1)
        found |= {"window": window, "window_blocks": shortest(slides)}
    return found


def shortest(letters: str) -> str:
    """Return the shortest pattern that gives `letters` when it is repeated."""
    for length in range(1, len(letters)):
        if (letters[:length] * len(letters))[: len(letters)] == letters:
            return letters[:length]
    return letters


def window_config(kind: str, args: LlamaArgs) -> dict[str, Any]:
    """Return what config.json of a kind has of windows and of blocks that do not rotate.

    Every key is there, also where nothing is on: a Mistral without one has a window of 4,096.
    """
    windows, may = [args.window_of(number) for number in range(args.n_layer)], FEATURES[kind][1]
    window = next((each for each in windows if each is not None), None)
    found: dict[str, Any] = {"sliding_window": window} if "window" in may else {}
    if "window_blocks" in may:
        found["layer_types"] = [WINDOW if each else FULL for each in windows]
    if kind in WITH_SWITCH:
        found["use_sliding_window"] = window is not None
    if kind == "smollm3":
        letters = map(args.rope_letter, range(args.n_layer))
        found["no_rope_layers"] = [int(letter != "n") for letter in letters]
        found["pad_token_id"] = None  # in its class 128004, which a small vocabulary lacks
    return found


def rope_of(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a table of rotary positions. Raises `UserError` for what we lack."""
    table = config["rope_parameters"]
    if nested := [name for name, value in table.items() if isinstance(value, dict)]:
        raise UserError(f"its rotary positions are those of layers of types: {', '.join(nested)}")
    if kind != "glm4_moe":
        require_all(table, {"partial_rotary_factor": [None, 1.0]})
    found: dict[str, Any] = {"rope_theta": number(table, "rope_theta"), "rope_scaling_factor": 1.0}
    scaling = table["rope_type"]
    if scaling == "default":
        return found
    if scaling not in [*SCALED_BY]:
        raise UserError(f"its rotary positions are scaled by {table}, which is not here")
    require_all(
        table, {"low_freq_factor": [LOW], "high_freq_factor": [HIGH], "truncate": [None, True]}
    )
    if scaling == "yarn" and table["factor"] is None:
        table = {**table, "factor": config["max_position_embeddings"] / number(table, ORIGINAL, 1)}
    for ours, name in SCALED_BY[scaling].items():
        if name not in OF_YARN.values() or table.get(name) is not None:
            found[ours] = number(table, name)
    both = table.get("mscale") and table.get("mscale_all_dim")
    if scaling == "yarn" and both and "rope_attention_factor" not in found:
        grown = 0.1 * math.log(number(table, "factor", 1))
        one, other = (grown * number(table, name) + 1 for name in ("mscale", "mscale_all_dim"))
        found["rope_attention_factor"] = one / other
    return found | {"rope_scaling": scaling}


def olmo_rope_of(config: Mapping[str, Any], windows: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of the tables of an OLMo 3: blocks with a window may lack the scaling.

    Raises `UserError` for another difference between them.
    """
    tables = config["rope_parameters"]
    full, narrow = (
        rope_of("olmo3", {**config, "rope_parameters": tables[each]}) for each in (FULL, WINDOW)
    )
    if narrow == full or "window" not in windows:
        return full
    if narrow != {"rope_theta": full["rope_theta"], "rope_scaling_factor": 1.0}:
        raise UserError(
            f"its rotary positions are {tables[FULL]} and {tables[WINDOW]}: blocks with a window "
            "may differ by their scaling alone"
        )
    letters = str.maketrans("sf", "ur")
    return full | {"rope_blocks": windows.get("window_blocks", "s").translate(letters)}


def rope_config(args: DecoderArgs) -> dict[str, Any]:
    """Return `rope_theta` and, where positions are scaled, `rope_scaling` of config.json.

    transformers 5 reads these of earlier versions too, and puts them into `rope_parameters`.
    """
    found: dict[str, Any] = {"rope_theta": args.rope_theta}
    if args.rope_scaling_factor == 1 and args.rope_attention_factor is None:
        return found
    ours = vars(args) | {"rope_original_len": args.original_len}
    values = {name: ours[each] for each, name in SCALED_BY[args.rope_scaling].items()}
    if args.rope_scaling == "llama3":
        values |= {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    table = {name: value for name, value in values.items() if value is not None}
    found["rope_scaling"] = {"rope_type": args.rope_scaling, **table}
    return found


def olmo_rope_config(args: LlamaArgs) -> dict[str, Any]:
    """Return `rope_parameters` of an OLMo 3, a table for each type of layer."""
    plain = {"rope_type": "default", "rope_theta": args.rope_theta}
    flat = rope_config(args)
    table = flat.pop("rope_scaling", plain) | {"rope_theta": flat.pop("rope_theta")}
    unscaled = "u" in map(args.rope_letter, range(args.n_layer))
    return flat | {"rope_parameters": {FULL: table, WINDOW: plain if unscaled else table}}
