"""Plans that are made once for an optimizer's parameters.

That is their order in the step's reductions, and the owners of their matrices.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.kinds import Kinds
from torchmars.optim.matrices.directions import Directions
from torchmars.optim.matrices.shapes import MatrixShape
from torchmars.optim.matrices.traffic import MatrixTraffic, OwnerLoads
from torchmars.optim.meshes import MeshAxes, MeshGroups, layout_key
from torchmars.optim.norms import ModelTotals, ShardSum
from torchmars.optim.rules import RULES, MatrixRule
from torchmars.optim.settings import CUT, FIXED
from torchmars.optim.state import Known, known_parameters
from torchmars.optim.tensors import local_part


class Plans:
    """Plans for the groups that `add` was called with. All follows from shapes and layouts.

    `mesh_groups` keeps the process groups, also from plans to later ones. For `norm_group` and
    `matrix_dtype` see `MARS`.
    """

    def __init__(
        self,
        mesh_groups: MeshGroups,
        norm_group: dist.ProcessGroup | None,
        matrix_dtype: str,
    ) -> None:
        self.mesh_groups, self.matrix_dtype = mesh_groups, matrix_dtype
        self.shard_sum = ShardSum(mesh_groups)
        self.totals = ModelTotals(mesh_groups, norm_group)
        self.parameters: list[Tensor] = []
        """All parameters, in the order of the step's reductions."""
        self.traffic: list[MatrixTraffic] = []
        """The matrices with their owners, those that lie alike together."""
        self.owner_loads: OwnerLoads = {}
        self.known: Known = []
        """The parameters of each group, and their layouts."""
        self.fixed: list[dict[str, Any]] = []
        """Each group's values of the settings `FIXED`."""
        self.kinds = Kinds()

    def without_groups(self) -> "Plans":
        """Return plans with the same settings and process groups, to which no group was added."""
        norm_group = self.totals.norm_group
        return Plans(self.mesh_groups, norm_group, self.matrix_dtype)

    def add(self, group: dict[str, Any]) -> None:
        """Give a group's parameters a place in the reductions and its matrices owners.

        Collective over the meshes of the parameters. If it raises, no owner has been assigned.
        """
        loads = {ranks: dict(each) for ranks, each in self.owner_loads.items()}
        traffic = []
        rule = RULES[group["rule"]]
        if isinstance(rule, MatrixRule):
            alike: dict[MeshAxes | None, list[Tensor]] = {}
            for parameter in group["params"]:
                alike.setdefault(layout_key(parameter), []).append(parameter)
            for parameters in alike.values():
                shapes = [
                    MatrixShape(tuple(p.shape), *(group[name] for name in CUT)) for p in parameters
                ]
                traffic.append(
                    MatrixTraffic(
                        parameters,
                        shapes,
                        Directions.of(group),
                        loads,
                        self.mesh_groups,
                        self.matrix_dtype,
                    )
                )
        for parameter in group["params"]:
            self.parameters.append(parameter)
            self.shard_sum.add(parameter)
        self.totals.cover(self.parameters)
        self.traffic += traffic
        self.owner_loads = loads
        self.known += known_parameters([group])
        self.fixed.append({name: group[name] for name in FIXED if name in group})

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        return local_part(self.parameters[0]).device if self.parameters else torch.device("cpu")
