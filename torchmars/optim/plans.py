"""Plans that are made once for an optimizer's parameters.

That is their order in the step's sums, and the owners of their matrices.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.matrices.exchange import Matrices, OwnerLoads
from torchmars.optim.matrices.orthogonal import Directions
from torchmars.optim.matrices.shapes import MatrixShape
from torchmars.optim.meshes import MeshAxes, MeshGroups, ModelSums, layout_key
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import CUT
from torchmars.optim.step import Kinds
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
        self.kinds = Kinds()
        self.device = torch.device("cpu")
        """That of the parameters."""
        self.conditional = False
        """Whether each write asks for the verdict on its step. A CPU's host need not wait for that,
        and leaves out the passes of a skipped step."""

    def without_groups(self) -> "Plans":
        """Return plans with the same settings and process groups, to which no group was added."""
        return Plans(self.mesh_groups, self.sums.norm_group, self.matrix_dtype)

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


def kept_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters: lists, which may be changed, as tuples."""
    values = ((name, each) for name, each in group.items() if name != "params")
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values}
