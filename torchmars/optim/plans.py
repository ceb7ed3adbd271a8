"""What is planned for an optimizer's parameters: their order in the step's sums, their owners.

And which of them a step has, by kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.matrices.exchange import Matrices, OwnerLoads
from torchmars.optim.matrices.orthogonal import Directions
from torchmars.optim.matrices.shapes import MatrixShape, is_stack
from torchmars.optim.meshes import MeshAxes, MeshGroups, ModelSums, layout_key
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import CUT
from torchmars.optim.step import GroupTensors, State
from torchmars.optim.tensors import Known, layout_of, local_part


class Plans:
    """Plans for the groups that `add` was called with. All follows from shapes and layouts.

    `mesh_groups` keeps the process groups, also from plans to later ones. `norm_group` and
    `matrix_dtype`: see `MARS`.
    """

    def __init__(
        self, mesh_groups: MeshGroups, norm_group: dist.ProcessGroup | None, matrix_dtype: str
    ) -> None:
        self.mesh_groups, self.matrix_dtype = mesh_groups, matrix_dtype
        self.sums = ModelSums(mesh_groups, norm_group)
        self.parameters: list[Tensor] = []
        """All parameters, in the order of the step's sums."""
        self.matrices: list[Matrices] = []
        """The matrices with their owners, those that lie alike together."""
        self.owner_loads: OwnerLoads = {}
        self.known: Known = []
        """The parameters of each group, and their layouts."""
        self.checked: list[dict[str, Any]] = []
        """The settings of each group as they were checked last."""
        self._dtypes: list[torch.dtype | None] | None = None  # of the gradients
        self.sorted: list[tuple[int, bool, list[Tensor]]] = []
        """Of each kind of parameters that have a gradient the number of the group, whether they are
        stacks, and which they are: another list if it changed."""
        self.places: dict[Tensor, tuple[int, int]] = {}
        """Of each of these parameters its kind, and its number there."""
        self.device = torch.device("cpu")  # that of the parameters
        self.conditional = False
        """Whether each write asks for the verdict on its step. A CPU's host need not wait for that,
        and leaves out the passes of a skipped step."""

    def add(self, group: dict[str, Any]) -> None:
        """Give a group's parameters a place in the sums and its matrices owners.

        Collective over the meshes of the parameters. If it raises, no owner has been assigned.
        """
        loads = {ranks: dict(each) for ranks, each in self.owner_loads.items()}
        matrices = []
        if isinstance(RULES[group["rule"]], MatrixRule):
            alike: dict[MeshAxes | None, list[Tensor]] = {}
            for parameter in group["params"]:
                alike.setdefault(layout_key(parameter), []).append(parameter)
            for some in alike.values():
                cut = {name: group[name] for name in CUT}
                shapes = [MatrixShape(tuple(each.shape), **cut) for each in some]
                directions = Directions(*(group[name] for name in Directions._fields))
                arguments = some, shapes, directions, loads
                matrices.append(Matrices(*arguments, self.mesh_groups, self.matrix_dtype))
        self.parameters += group["params"]
        if self.parameters:
            self.device = local_part(self.parameters[0]).device
            self.conditional = self.device.type != "cpu"
        self.sums.cover(self.parameters)
        self.matrices += matrices
        self.owner_loads = loads
        self.known.append({each: layout_of(each) for each in group["params"]})
        self.checked.append(kept_settings(group))

    def gather(
        self, param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, State]
    ) -> list[GroupTensors]:
        """Return the tensors of a step. Raises `ValueError` for a clip without a last gradient."""
        dtypes = [
            None if (gradient := parameter.grad) is None else gradient.dtype
            for group in param_groups
            for parameter in group["params"]
        ]
        if dtypes != self._dtypes:
            kinds: dict[Any, list[Tensor]] = {}
            for number, settings in enumerate(param_groups):
                for each in settings["params"]:
                    if each.grad is not None:
                        of_group = number, is_stack(each.shape, settings["flatten"])
                        kind = *of_group, each.dtype, each.grad.dtype, *state[each]
                        kinds.setdefault(kind, []).append(each)
            # Neighbours of one length share a compiled call.
            alike = [sorted(some, key=lambda each: each.shape) for some in kinds.values()]
            self._dtypes = dtypes
            self.sorted = [(*kind[:2], some) for kind, some in zip(kinds, alike)]
            self.places = {
                each: (kind, number)
                for kind, some in enumerate(alike)
                for number, each in enumerate(some)
            }
        groups = [
            GroupTensors(param_groups[number], some, [state[each] for each in some], stacks)
            for number, stacks, some in self.sorted
        ]
        for group in groups:
            corrects = not group.rule.variance_reduced or group.corrects
            if not corrects and group.settings["clip"] is not None:
                raise ValueError(
                    "clip cannot be switched on after the optimizer was created without it: "
                    "no last gradient was kept"
                )
        return groups


def kept_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters: lists, which may be changed, as tuples."""
    values = ((name, each) for name, each in group.items() if name != "params")
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values}
