"""Matrices that are stored as one, and how they are cut.

Only what a name or a type alone says: all else is told by a group's `split`.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # torch 2.11 to 2.15: the one base of all convolutions

from torchmars.optim.settings import Settings

# The first half of the rows, or of the columns, is the gate.
_HALVES = ("gate_up_proj", "up_gate_proj")
_THIRDS = ("qkv", "in_proj_weight")  # of vision models, and of torch's own attention
# Modules that wrap another one, whose names come between its own and its layer's.
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "module"}
# Each gate of torch's own layers is a matrix.
_GATES_OF = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
_CONV1D = re.compile("Conv1D")
# transformers' routers whose weights follow from a softmax over experts. Others say `is_softmax`.
_SOFTMAX_ROUTER = re.compile(r"(Mixtral|Qwen)\w*Top[kK]Router")


def cut_of(name: str, parameter: Tensor, modules: Mapping[str, nn.Module]) -> Settings:
    """Return the settings `split`, `transposed` and `flatten` that take a parameter apart.

    `modules` are those of the model by name. Empty if it is one matrix, or is not known.
    """
    path, layer, _ = _place(name, modules)
    owner = modules[path]
    transposed = {"transposed": True} if _is_conv1d(owner) else {}
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


def _is_one(module: nn.Module, kind: re.Pattern[str]) -> bool:
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
    return _is_one(owner, _CONV1D) and hasattr(owner, "nf")


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
