"""What names and types say of a model's parameters: their roles, and which are cut, and how.

Source: the table "who gets which rule" of the MARS and MARS-M papers and their code (arXiv
2411.10438, 2510.21800). Names are from torchvision, timm and transformers. Matrices that are stored
as one without a name that says it are told by a group's `split`.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # torch 2.11 to 2.15: the one base of all convolutions

from torchmars.optim.settings import Settings

ROLES = ("matrix", "router", "convolution", "embedding", "head", "vector")

_EMBEDDINGS = nn.Embedding | nn.EmbeddingBag
_NORMS = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm
# Parts of the name of a parameter that a module holds directly, such as cls_token or rel_pos_h.
_EMBEDDING_PARTS = set(
    "embed embeds embedding embeddings token tokens pos position positional table wte wpe "
    "codebook codebooks".split()
)
_NO_TOKENS = re.compile("pos|wpe|type|segment|relative|codebook|cls|reg|mask")  # of other tables
_NORM_NAME = re.compile(r"(.*_)?(norm|layernorm|layer_norm|ln)(_?\w)?", re.IGNORECASE)
_GATES = {"gate", "gates", "gating", "wg"}  # names that may choose experts, beside them
# A_log: decay rates of Mamba. The others have a number for each block, head or channel.
_VECTOR_NAME = re.compile(r"(.*_)?(bias(es)?|lambdas?|scales?|scalars?)|A_log")
_HEAD_NAME = re.compile(r"head|lm_head|classifier|to_logits|unembed(ding)?")
# These are hidden matrices where they are repeated, as q_head in each block of Funnel Transformers.
_OTHER_HEAD_NAME = re.compile(r"(?!pre_).*_(head|classifier)|head_dist|output_layer")
_OTHER_HEAD_LAYER = re.compile(r"output|score")  # BERT's blocks have modules of several so named

# The first half of the rows, or of the columns, is the gate.
_HALVES = ("gate_up_proj", "up_gate_proj")
_THIRDS = ("qkv", "in_proj_weight")  # of vision models, and of torch's own attention
# Modules that wrap another one, whose names come between its own and its layer's.
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "module"}
# Each gate of torch's own layers is a matrix.
_GATES_OF = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
# transformers' routers whose weights follow from a softmax over experts. Others say `is_softmax`.
_SOFTMAX_ROUTER = r"(Mixtral|Qwen)\w*Top[kK]Router"


def roles(model: nn.Module) -> dict[str, str]:
    """Return the role of every trainable parameter, by name: one of ROLES.

    An embedding is the parameter of an `nn.Embedding`, also where an output layer shares it, and
    one that a module holds under a name such as cls_token or pos_embed. A vector has fewer than two
    dimensions, or one at most that is longer than 1 (a gate [1, d]), or is a norm's, a bias, or
    named as a scale. The head is the last matrix in a module named head, lm_head, to_logits,
    classifier or *_head, or a layer named output or score, and in a model without any of these its
    last layer, if that is an `nn.Linear` that the model holds itself (fc). By its size it is the
    one layer with as many rows as the table of tokens: see `sized_as_tokens`.
    Weights of convolutions are matrices [out, -1], but those of depthwise ones, which have a filter
    for each channel: vectors. A matrix in a module that is named as a router, or as a gate beside
    experts, is a router. All else is a matrix, or a batch of them.
    """
    modules = dict(model.named_modules())
    owners = {id(p): each for each in model.modules() for p in each.parameters(recurse=False)}
    for each in model.modules():  # a tied tensor is an embedding, whatever else holds it
        if isinstance(each, _EMBEDDINGS):
            owners |= {id(p): each for p in each.parameters(recurse=False)}
    heads = _heads(model)
    found = {
        name: _role(name, parameter, owners[id(parameter)], name in heads, modules)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    layers, tables = sized_as_tokens(model, found)
    if len(layers) == 1:
        found[layers[0]] = "head"
    if len(tables) == 1:
        found[tables[0]] = "embedding"
    return found


def sized_as_tokens(model: nn.Module, found: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of matrices, by roles `found`, that have as many rows as tokens are known.

    That are the layers, unless a head or a tied table has these rows: one of them may be the head.
    And the raw tables [tokens, d] or [d, tokens], which a module holds by another name than weight.
    Neither where embeddings differ in rows, so that nobody knows which is of tokens.
    """
    named = [each for each in model.named_parameters(remove_duplicate=False) if each[1].ndim == 2]
    tables = [
        (name, parameter)
        for name, parameter in named
        if found.get(name) == "embedding" and not _NO_TOKENS.search(name)
    ]
    if len(sizes := {len(parameter) for _, parameter in tables}) != 1:
        return [], []
    [tokens] = sizes
    heads = [p for name, p in named if found.get(name) == "head" and tokens in p.shape]
    others = [p for name, p in named if name not in found]  # tied tables have a second name
    tied = any(p is table for p in others for _, table in tables)
    layers, raw = [], []
    for name, parameter in named:
        if found.get(name) == "matrix" and tokens in parameter.shape:
            if "weight" not in name.rpartition(".")[2]:
                raw.append(name)
            elif len(parameter) == tokens and not heads and not tied:
                layers.append(name)
    return layers, raw


def looks_outer(name: str) -> bool:
    """Return whether a parameter's name alone says that it is an embedding or a head."""
    parts = name.split(".")
    last = parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
    embeds = _EMBEDDING_PARTS & set(last.split("_")) and "patch" not in last
    return bool(embeds or _HEAD_NAME.fullmatch(last) or last in ("W_E", "W_U"))


def _role(
    name: str, parameter: Tensor, owner: nn.Module, is_head: bool, modules: Mapping[str, nn.Module]
) -> str:
    *path, last = name.split(".")
    if isinstance(owner, _EMBEDDINGS):
        return "embedding"
    if parameter.ndim < 2 or isinstance(owner, _NORMS) or _VECTOR_NAME.fullmatch(last):
        return "vector"
    if path and _NORM_NAME.fullmatch(path[-1]) and not isinstance(owner, nn.Linear):
        return "vector"
    if isinstance(owner, _ConvNd) and owner.groups > 1 and parameter.shape[1] == 1:
        return "vector"  # a filter for each channel
    is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
    if is_matrix and _chooses_experts(name, parameter, owner, modules):
        return "router"
    if _EMBEDDING_PARTS & set(last.split("_")) or last == "W_E":
        return "embedding"
    if is_head or last == "W_U":
        return "head"
    if isinstance(owner, _ConvNd):
        return "convolution"
    return "matrix" if sum(size > 1 for size in parameter.shape) > 1 else "vector"


def _chooses_experts(
    name: str, parameter: Tensor, owner: nn.Module, modules: Mapping[str, nn.Module]
) -> bool:
    """Return whether a matrix of a module, its `owner`, makes the scores of experts.

    It is the last one of a module that is named as a router, or as a gate and lies beside experts.
    """
    *path, last = name.split(".")
    for number, part in enumerate(path):
        holder = modules[".".join(path[:number])]
        if part == "router" or (part in _GATES and _has_experts(holder)):
            inside = modules[".".join(path[: number + 1])].parameters()
            return parameter is [each for each in inside if each.ndim == 2][-1]
    if last in _GATES and _has_experts(owner):
        return True
    return _is_one(owner, ".*Router")


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has members named as experts."""
    members = *module.named_children(), *module.named_parameters(recurse=False)
    return any("expert" in name for name, _ in members)


def _heads(model: nn.Module) -> set[str]:
    """Return the names of the output layers' weights, also of those that an embedding shares."""
    # With duplicates, since a tied output layer says that the last matrix is a hidden one.
    matrices = [name for name, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1]
    last_in: dict[str, str] = {}  # by module named as a head
    for name in matrices:
        parts = name.split(".")[:-1]
        for number, part in enumerate(parts):
            layer = number == len(parts) - 1 and _OTHER_HEAD_LAYER.fullmatch(part)
            if layer or _HEAD_NAME.fullmatch(part) or _OTHER_HEAD_NAME.fullmatch(part):
                last_in[".".join(parts[: number + 1])] = name
    alike: dict[str, list[str]] = {}
    for prefix in last_in:
        alike.setdefault(re.sub(r"\d+", "*", prefix), []).append(prefix)
    heads = {
        last_in[prefix]
        for same in alike.values()
        for prefix in same
        if len(same) == 1 or _HEAD_NAME.fullmatch(prefix.rpartition(".")[2])
    }
    if heads or not matrices:
        return heads
    # Wrappers, such as DDP's, have nothing but one child.
    root, path = model, ""
    while not [*root.parameters(recurse=False)]:
        children = [each for each in root.named_children() if [*each[1].parameters()]]
        if len(children) != 1:
            break
        path += f"{children[0][0]}."
        root = children[0][1]
    owner, _, last = matrices[-1].removeprefix(path).rpartition(".")
    linear = "." not in owner and isinstance(dict(root.named_children()).get(owner), nn.Linear)
    return {matrices[-1]} if linear and last == "weight" else set()


def cut_of(name: str, parameter: Tensor, modules: Mapping[str, nn.Module]) -> Settings:
    """Return the settings `split`, `transposed` and `flatten` that take a parameter apart.

    `modules` are those of the model by name. Empty if it is one matrix, or is not known.
    """
    path, layer, _ = _place(name, modules)
    owner = modules[path]
    # transformers' linear layer that keeps its weight as [in, out].
    is_conv1d = _is_one(owner, "Conv1D") and hasattr(owner, "nf")
    transposed = {"transposed": True} if is_conv1d else {}
    if isinstance(owner, _ConvNd):
        return {"split": owner.groups} if owner.groups > 1 else {}
    if layer.startswith(("weight_ih", "weight_hh")):
        gates = next((n for kind, n in _GATES_OF.items() if isinstance(owner, kind)), 1)
        return {"split": gates} if gates > 1 else {}
    if parameter.ndim == 3 and layer in (*_HALVES, "down_proj"):
        return _of_experts(owner, layer)
    rows, cols = parameter.shape[:2][:: -1 if transposed else 1]
    if layer in _HALVES and rows % 2 == 0:
        return {"split": 2} | transposed
    thirds = layer in _THIRDS or (transposed and layer == "c_attn")
    parts = next((each for each in (3, 2) if thirds and rows == each * cols), 1)
    return ({"split": parts} if parts > 1 else {}) | transposed


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


def softmax_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a router's choice and weights do not change where all logits move alike.

    Its gradient has no mean over experts then. A router may say it by an attribute, `is_softmax`.
    """
    owner = modules[name.rpartition(".")[0]]
    known = getattr(owner, "is_softmax", None)
    return _is_one(owner, _SOFTMAX_ROUTER) if known is None else bool(known)


def _is_one(module: nn.Module, kind: str) -> bool:
    """Return whether a module's class, or one that it inherits from, has such a name.

    FSDP2 makes a class of its own of each that it shards.
    """
    return any(re.fullmatch(kind, each.__name__) for each in type(module).__mro__)


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


def _of_experts(owner: nn.Module, layer: str) -> Settings:
    """Return how a stack of experts' matrices is cut: gates and ups, [E, 2I, d] or [E, d, 2I]."""
    down, both = (getattr(owner, name, None) for name in ("down_proj", "gate_up_proj"))
    if both is None or down is None or not both.ndim == down.ndim == 3:
        return {}
    _, first, second = down.shape
    known: dict[tuple[int, ...], Settings]
    known = {(2 * second, first): {}, (second, 2 * first): {"transposed": True}}
    oriented = known.get(tuple(both.shape[1:]))
    if oriented is None or layer == "down_proj":
        return oriented or {}
    # Each second row, or column, is a gate where they do not come one after the other.
    return {"split": 2 if getattr(owner, "is_concatenated", True) else (1, 1)} | oriented
