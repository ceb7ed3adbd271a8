"""The Llama family in Hugging Face's transformers: Llama, Mistral, Qwen, OLMo 3, GLM-4.5 and more.

A class there has fixed what is a setting here: `FEATURES` says which.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchmars.config.llama import LlamaArgs
from torchmars.config.model_args import LLAMA3_CONTEXT, DecoderArgs
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
    whole_number,
)
from torchmars.models.llama import Llama
from torchmars.models.model import Model
from torchmars.models.rotary import HIGH, LOW

ORIGINAL = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)
WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
READS = (*ROPE, *WINDOWS, "no_rope_layers", "no_rope_layer_interval")
SHAPE = {
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
PLAIN = {"n_expert": 0, "rotary_fraction": 1.0} | dict.fromkeys(SWITCHES, False)
PLAIN_EXPERTS = {"router": "softmax", "n_expert_shared": 0, "n_dense": 0, "routed_scaling": 1.0}
PLAIN_EXPERTS |= {"norm_topk_prob": True}
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
        "qwen3_moe": ModelKind(
            MIXTURE | {"n_expert": "num_experts"},
            ALLOWED
            | {"decoder_sparse_step": [1], "mlp_only_layers": (None, []), "norm_topk_prob": EITHER},
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
            MIXTURE | SIGMOID | {"n_dense": "first_k_dense_replace", "qkv_bias": "attention_bias"},
            ALLOWED
            | dict.fromkeys(("attention_bias", "use_qk_norm", "norm_topk_prob"), EITHER)
            | {"n_group": [1], "topk_group": [1]},
            READS,
        ),
    }
    names: Mapping[str, str] = LLAMA_NAMES

    def section(self, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        windows = windows_there(kind, config)
        found: dict[str, Any] = {"name": "llama"} | {
            name: name in FEATURES[kind][0] for name in SWITCHES
        }
        found |= {"tied": config["tie_word_embeddings"], **windows}
        found |= olmo_rope_of(config, windows) if kind == "olmo3" else rope_of(kind, config)
        if config.get("head_dim") is None:
            heads = whole_number(config, "num_attention_heads")
            config = {**config, "head_dim": whole_number(config, "hidden_size") // heads}
        if kind == "glm4_moe":
            found |= {"router": "sigmoid", "qk_norm": config["use_qk_norm"]}
            found["rotary_fraction"] = number(config["rope_parameters"], "partial_rotary_factor")
        return found | shape_of(self.kinds[kind], config)

    def config(self, model: Any) -> dict[str, Any]:
        args = model.args
        kind = kind_there(args)
        title = {"smollm3": "SmolLM3"}.get(kind, kind.title().replace("_", ""))
        found: dict[str, Any] = {"architectures": [f"{title}ForCausalLM"], "model_type": kind}
        found |= {"attention_bias": False, **keys_of(self.kinds[kind], args)}
        found |= olmo_rope_config(args) if kind == "olmo3" else rope_config(args)
        found |= {"hidden_act": "silu", "tie_word_embeddings": args.tied}
        if kind == "qwen3_moe":
            found |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        if kind == "glm4_moe":
            found |= {"n_group": 1, "topk_group": 1, "use_qk_norm": args.qk_norm}
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
    plain = PLAIN | (PLAIN_EXPERTS if args.n_expert else {})
    has = {name: getattr(args, name) != value for name, value in plain.items()}
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
    """Return `window`, `window_blocks` and `rope_blocks` of a config.json, where they are not ours.

    Raises `UserError` for lists that its class would not follow.
    """
    found: dict[str, Any] = {}
    if kind == "smollm3":
        rotates = by_block(config, "no_rope_layers")
        if {*map(str, rotates)} - {"0", "1"}:
            raise UserError(f"its no_rope_layers is {rotates!r}: it must have 0 and 1 only")
        if not all(rotates):
            found["rope_blocks"] = shortest("".join("nr"[each] for each in rotates))
    types, window, may = config.get("layer_types"), config.get("sliding_window"), FEATURES[kind][1]
    known = (FULL, WINDOW) if "window_blocks" in may else [FULL]
    if types is not None and kind == "mistral":
        raise UserError(
            "its layer_types are not followed by its class, which gives all blocks the window: "
            "leave them out, or say model_type = ministral"
        )
    for each in types or ():
        require_all({"layer_types": each}, {"layer_types": known})
    on = "window" in may and (kind not in WITH_SWITCH or config["use_sliding_window"])
    if window is None or not on:
        if WINDOW in (types or ()):
            raise UserError(f"its layer_types has {WINDOW!r}, and its window is off or null")
        return found
    slides = [each == WINDOW for each in types or [WINDOW] * config["num_hidden_layers"]]
    if any(slides):
        found["window"] = whole_number(config, "sliding_window")
    if any(slides) and not all(slides):
        found["window_blocks"] = shortest("".join("fs"[each] for each in slides))
    return found


def by_block(config: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list with an entry for each block. Raises `UserError` if it is none."""
    found, blocks = config[name], config["num_hidden_layers"]
    if not isinstance(found, list) or len(found) != blocks:
        raise UserError(
            f"its {name} is {found!r}: it must have an entry for each of {blocks} blocks"
        )
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
    if kind in ("qwen2", "qwen3"):
        first = (number for number, each in enumerate(windows) if each)
        found["max_window_layers"] = next(first, len(windows))
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
    found: dict[str, Any] = {"rope_theta": number(table, "rope_theta")}
    scaling = table["rope_type"]
    if scaling == "default":
        return found | {"rope_scaling_factor": 1.0}
    if scaling not in ("llama3", "linear", "yarn", "dynamic"):
        raise UserError(f"its rotary positions are scaled by {table}, which is not here")
    longest = whole_number(config, "max_position_embeddings")
    if scaling == "yarn" and table["factor"] is None:
        table = {**table, "factor": longest / whole_number(table, ORIGINAL)}
    found["rope_scaling_factor"] = number(table, "factor")
    if scaling == "llama3":
        require_all(table, {"low_freq_factor": [LOW], "high_freq_factor": [HIGH]})
        original = whole_number(table, ORIGINAL)
        return found | ({} if original == LLAMA3_CONTEXT else {"rope_original_len": original})
    found["rope_scaling"] = scaling
    if scaling == "dynamic":
        found["rope_original_len"] = longest
    return found | (yarn_of(table) if scaling == "yarn" else {})


def yarn_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of YaRN. Raises `UserError` for one that we lack."""
    require_all(table, {"truncate": [None, True]})
    found: dict[str, Any] = {"rope_original_len": whole_number(table, ORIGINAL)}
    for name in ("beta_fast", "beta_slow"):
        if table.get(name):
            found[f"rope_{name}"] = number(table, name)
    if table.get("attention_factor") is not None:
        found["rope_attention_factor"] = number(table, "attention_factor")
    elif table.get("mscale") and table.get("mscale_all_dim"):
        grown = 0.1 * math.log(number(table, "factor"))
        one, other = (grown * number(table, name) + 1 for name in ("mscale", "mscale_all_dim"))
        found["rope_attention_factor"] = one / other
    return found


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
    if args.rope_scaling_factor == 1 and args.rope_attention_factor is None:
        return {"rope_theta": args.rope_theta}
    table: dict[str, Any] = {"rope_type": args.rope_scaling, "factor": args.rope_scaling_factor}
    if args.rope_scaling == "llama3":
        table |= {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    if args.rope_scaling == "yarn":
        table |= {"beta_fast": args.rope_beta_fast, "beta_slow": args.rope_beta_slow}
        if args.rope_attention_factor is not None:
            table["attention_factor"] = args.rope_attention_factor
    if args.rope_scaling in ("llama3", "yarn"):
        table[ORIGINAL] = args.original_len
    found = {"rope_theta": args.rope_theta, "rope_scaling": table}
    # The frequencies of a longer sequence would follow from this length.
    longest = {"max_position_embeddings": args.original_len}
    return found | (longest if args.rope_scaling == "dynamic" else {})


def olmo_rope_config(args: LlamaArgs) -> dict[str, Any]:
    """Return `rope_parameters` of an OLMo 3, a table for each type of layer."""
    plain = {"rope_type": "default", "rope_theta": args.rope_theta}
    flat = rope_config(args)
    table = flat.pop("rope_scaling", plain) | {"rope_theta": flat.pop("rope_theta")}
    unscaled = "u" in map(args.rope_letter, range(args.n_layer))
    return flat | {"rope_parameters": {FULL: table, WINDOW: plain if unscaled else table}}
