"""Roles of a model's parameters: the kind of each parameter, whatever its rule.

Source: the table "who gets which rule" of the MARS and MARS-M papers and their code (arXiv
2411.10438, 2510.21800). Names are from torchvision, timm and transformers.
"""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # torch 2.11 to 2.15: the one base of all convolutions

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


def looks_like(name: str) -> str | None:
    """Return the role "embedding" or "head" where a parameter's name alone says it, else None."""
    parts = name.split(".")
    last = parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
    if last == "W_E" or (_EMBEDDING_PARTS & set(last.split("_")) and "patch" not in last):
        return "embedding"
    return "head" if _HEAD_NAME.fullmatch(last) or last == "W_U" else None


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
    return any(each.__name__.endswith("Router") for each in type(owner).__mro__)


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has members named as experts."""
    names = [name for name, _ in module.named_children()]
    names += [name for name, _ in module.named_parameters(recurse=False)]
    return any("expert" in name for name in names)


def _heads(model: nn.Module) -> set[str]:
    """Return the names of the output layers' weights, also of those that an embedding shares."""
    # With duplicates, since a tied output layer says that the last matrix is a hidden one.
    matrices = [name for name, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1]
    last_in: dict[str, str] = {}  # by module named as a head
    for name in matrices:
        last_in |= {prefix: name for prefix in _head_prefixes(name)}
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


def _head_prefixes(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a parameter that are named as a head."""
    parts = name.split(".")[:-1]
    for number, part in enumerate(parts):
        layer = number == len(parts) - 1 and _OTHER_HEAD_LAYER.fullmatch(part)
        if layer or _HEAD_NAME.fullmatch(part) or _OTHER_HEAD_NAME.fullmatch(part):
            yield ".".join(parts[: number + 1])
