"""Matrices that are stored as one, in models of transformers, timm and torch, and how they are cut.

A layer's use of its output shows where one matrix ends and the next begins: the code of
transformers 5.24. Others are known by names that say it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # torch 2.11 to 2.15: the one base of all convolutions

from torchmars.optim.settings import Settings

# The rows of each matrix, by a layer's own attributes or its config's.
Rows = Callable[[Any], int | tuple[int, ...]]


def _heads_of_three(holder: Any) -> tuple[int, ...]:
    """Each head has its own q, k and v, one after the other."""
    return (_head_dim(holder),) * 3


def _head_dim(holder: Any) -> int:
    for name in ("head_dim", "head_size", "attention_head_size"):
        if isinstance(size := getattr(holder, name, None), int):
            return size
    raise AttributeError(f"{type(holder).__name__} has no head_dim")


def _falcon(holder: Any) -> tuple[int, ...]:
    size, heads = holder.head_dim, holder.num_heads
    if holder.new_decoder_architecture:
        return heads // holder.num_kv_heads * size, size, size
    return (heads * size if holder.multi_query else size), size, size


def _grouped_query(holder: Any) -> tuple[int, ...]:
    kv = holder.num_key_value_heads * holder.head_dim
    return holder.config.num_attention_heads * holder.head_dim, kv, kv


def _bigcode(holder: Any) -> tuple[int, ...]:
    if holder.multi_query:
        return holder.embed_dim, holder.kv_dim, holder.kv_dim
    return _heads_of_three(holder)


def _qkvz(holder: Any) -> tuple[int, ...]:
    key, value = holder.head_k_dim, holder.num_v_heads // holder.num_k_heads * holder.head_v_dim
    return key, key, value, value


def _mamba2(holder: Any) -> tuple[int, ...]:
    inner, states = holder.intermediate_size, holder.n_groups * holder.ssm_state_size
    return inner, inner, states, states, holder.num_heads


# By the class of the module that holds the layer, and the name of the layer in it.
_LAYERS: list[tuple[str, str, Rows]] = [
    ("Phi3Attention|Phi4MultimodalAttention", "qkv_proj", _grouped_query),
    (
        "(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon|Fuyu)Attention",
        "query_key_value",
        _heads_of_three,
    ),
    ("MiniMaxLightningAttention", "qkv_proj", _heads_of_three),
    ("DisentangledSelfAttention", "in_proj", _heads_of_three),
    ("FalconAttention|FalconFlashAttention2", "query_key_value", _falcon),
    ("(Mpt|ModernBert\\w*)Attention", "Wqkv", lambda holder: 3),
    ("DbrxAttention", "Wqkv", _grouped_query),
    ("GPTBigCode\\w*Attention", "c_attn", _bigcode),
    ("CodeGenAttention", "qkv_proj", lambda holder: (holder.embed_dim // 4,) * 3),  # of 4 devices
    ("JetMoeAttention", "kv_proj", lambda holder: 2),
    ("JetMoeMoE|JetMoeParallelExperts", "input_linear", lambda holder: 2),
    ("GraniteMoe\\w*MLP", "input_linear", lambda holder: 2),
    ("ModernBert\\w*MLP", "Wi", lambda holder: 2),
    ("(Qwen3Next|Qwen3_5|Qwen3_5Moe)Attention", "q_proj", lambda holder: (holder.head_dim,) * 2),
    ("\\w*GatedDeltaNet", "in_proj_qkvz", _qkvz),
    (
        "\\w*GatedDeltaNet",
        "in_proj_ba",
        lambda holder: (holder.num_v_heads // holder.num_k_heads,) * 2,
    ),
    (
        "\\w*GatedDeltaNet",
        "in_proj_qkv",
        lambda holder: (holder.key_dim, holder.key_dim, holder.value_dim),
    ),
    ("(Mamba|FalconMamba|JambaMamba)Mixer", "in_proj", lambda holder: 2),
    (
        "(Mamba|FalconMamba|JambaMamba)Mixer",
        "x_proj",
        lambda holder: (holder.time_step_rank, holder.ssm_state_size, holder.ssm_state_size),
    ),
    (
        "Mamba2Mixer|BambaMixer|FalconH1Mixer|GraniteMoeHybridMambaLayer|NemotronHMamba2Mixer"
        "|Zamba2MambaMixer",
        "in_proj",
        _mamba2,
    ),
    ("Lfm2\\w*ShortConv", "in_proj", lambda holder: 3),
    (
        "\\w*Attention",
        "kv_b_proj",
        lambda holder: (holder.qk_nope_head_dim, holder.v_head_dim),
    ),
    (
        "\\w*Attention",
        "kv_a_proj_with_mqa",
        lambda holder: (holder.kv_lora_rank, holder.qk_rope_head_dim),
    ),
    ("DbrxExpertGLU", "w1|v1|w2", lambda holder: holder.moe_num_experts),
    ("MultiheadAttention", "in_proj_weight", lambda holder: 3),  # torch's own
]
# In any model: the first half of the rows, or of the columns, is the gate.
_HALVES = re.compile("gate_up_proj|up_gate_proj")
_THIRDS = re.compile("qkv")
# Modules that wrap another one, whose names come between its own and its layer's.
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "module"}
_GATES_OF = {"LSTM": 4, "GRU": 3}  # each is a matrix of torch's own layers
# Names of weights that may be several matrices.
_LOOKS_FUSED = re.compile(
    "(.*_)?(w?qkvz?|query_key_value|c_attn|in_proj_weight|gate_up|w12|w13|to_kv)(_.*)?"
    "|up_gate(_proj)?|att_proj|(queries_)?keys_values|key_value|kv|qk|W_pack|gate_and_up|w1w3",
    re.IGNORECASE,
)
_CONV1D = re.compile("Conv1D")
_EINSUM = re.compile("XLNetRelativeAttention")  # its matrices are [in, heads, size of a head]
# Routers whose weights follow from a softmax over experts, or over those that were chosen.
_SOFTMAX_ROUTER = re.compile(
    "(AriaText|DeepseekV2|Ernie4_5_Moe|FlexOlmo|GptOss|GraniteMoe(SWA|Hybrid|Shared)?|Jamba"
    "|LaraMini|Mellum|MiniMax|Mixtral|Olmoe|OpenAIPrivacyFilter|Qwen2Moe|Qwen3Moe|Qwen3Next|Qwen3_5Moe"
    "|Qwen3VLMoeText|Qwen3OmniMoe\\w+)Top[kK]Router"
)


def cut_of(name: str, parameter: Tensor, modules: Mapping[str, nn.Module]) -> Settings:
    """Return the settings `split`, `transposed` and `flatten` that take a parameter apart.

    `modules` are those of the model by name. Empty if it is one matrix, or is not known.
    """
    path, layer, holder = _place(name, modules)
    owner = modules[path]
    transposed = {"transposed": True} if _is_conv1d(owner) else {}
    if isinstance(owner, _ConvNd):
        return {"split": owner.groups} if owner.groups > 1 else {}
    if isinstance(owner, nn.RNNBase) and layer.startswith(("weight_ih", "weight_hh")):
        gates = _GATES_OF.get(owner.mode, 1)
        return {"split": gates} if gates > 1 else {}
    if is_one(owner, _EINSUM) and parameter.ndim == 3:
        return {"flatten": True}
    if parameter.ndim == 3 and (_HALVES.fullmatch(layer) or layer == "down_proj"):
        return _of_experts(owner, layer)
    for kind, layers, rows in _LAYERS:
        if re.fullmatch(layers, layer) and is_one(holder, re.compile(kind)):
            try:
                return {"split": rows(holder)}
            except AttributeError:  # of another version
                return {}
    rows_of = parameter.shape[1 if transposed else 0]
    if _HALVES.fullmatch(layer) and rows_of % 2 == 0:
        return {"split": 2} | transposed
    thirds = _THIRDS.fullmatch(layer) or (transposed and layer == "c_attn")
    for parts in (3, 2) if thirds else ():
        if rows_of == parts * parameter.shape[0 if transposed else 1]:
            return {"split": parts} | transposed
    return transposed


def heads_of(name: str, modules: Mapping[str, nn.Module]) -> Settings:
    """Return the settings that cut a parameter into the rows of heads; none where it has none.

    The module that holds the layer declares them: its `head_rows` has, by the name of a layer, a
    `split`. A matrix of one head is left as it is.
    """
    _, layer, holder = _place(name, modules)
    declared = getattr(holder, "head_rows", None)
    if not isinstance(declared, Mapping) or layer not in declared:
        return {}
    return {"split": declared[layer], "per_head": declared[layer] != 1}


def looks_fused(name: str) -> bool:
    """Return whether the name of a parameter says that it may be several matrices."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return any(_LOOKS_FUSED.fullmatch(part) for part in parts[-2:] if part != "weight")


def softmax_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a router's choice and weights do not change where all logits move alike.

    Its gradient has no mean over experts then. A router may say it by an attribute, `is_softmax`.
    """
    owner = modules[name.rpartition(".")[0]]
    known = getattr(owner, "is_softmax", None)
    return is_one(owner, _SOFTMAX_ROUTER) if known is None else bool(known)


def is_one(module: nn.Module, kind: re.Pattern[str]) -> bool:
    """Return whether a module's class, or one that it inherits from, has that name.

    FSDP2 makes a class of its own of each that it shards.
    """
    return any(kind.fullmatch(each.__name__) for each in type(module).__mro__)


def _place(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, str, nn.Module]:
    """Return the path of a parameter's module, the layer's name, and the module that holds it.

    The layer is a module with a `weight`, or a parameter that the holder has itself.
    """
    path, _, last = name.rpartition(".")
    if last != "weight":
        return path, last, modules[path]
    outer, _, layer = path.rpartition(".")
    while layer in WRAPPERS:
        outer, _, layer = outer.rpartition(".")
    return path, layer, modules[outer]


def _is_conv1d(owner: nn.Module) -> bool:
    """Return whether a module is transformers' linear layer that keeps its weight as [in, out]."""
    return is_one(owner, _CONV1D) and hasattr(owner, "nf")


def _of_experts(owner: nn.Module, layer: str) -> Settings:
    """Return how a stack of experts' matrices is cut: gates and ups, [E, 2I, d] or [E, d, 2I]."""
    down = getattr(owner, "down_proj", None)
    both = getattr(owner, "gate_up_proj", None)
    if both is None or down is None or not both.ndim == down.ndim == 3:
        return {}
    _, first, second = down.shape
    if both.shape[1:] == (2 * second, first):
        oriented = {}
    elif both.shape[1:] == (second, 2 * first):
        oriented = {"transposed": True}
    else:
        return {}
    if layer == "down_proj":
        return oriented
    # Each second row, or column, is a gate where they do not come one after the other.
    return {"split": 2 if getattr(owner, "is_concatenated", True) else (1, 1)} | oriented
