"""What is planned once for an optimizer's parameters.

That is their places in the step's reductions, and the owners of their matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchmars.optim.exchange import MatrixTraffic, OwnerLoads
from torchmars.optim.norms import Agreement, MeshAxes, MeshGroups, ShardSum, layout_key
from torchmars.optim.owners import MatrixShape
from torchmars.optim.rules import RULES
from torchmars.optim.rules.matrix import MatrixRule
from torchmars.optim.state import Known, known_parameters


class Plans:
    """Plans for the groups that `add` was called with. All follows from shapes and layouts.

    `mesh_groups` keeps the process groups, also from plans to later ones. `norm_group` and
    `matrix_dtype` are those of `MARS`.
    """

    def __init__(
        self, mesh_groups: MeshGroups, norm_group: dist.ProcessGroup | None, matrix_dtype: str
    ) -> None:
        self.mesh_groups, self.matrix_dtype = mesh_groups, matrix_dtype
        self.shard_sum = ShardSum(mesh_groups)
        self.agreement = Agreement(mesh_groups, norm_group)
        self.places: dict[Tensor, int] = {}
        """The place of each parameter among the reduced products."""
        self.traffic: list[MatrixTraffic] = []
        """The matrices with their owners, those that lie alike together."""
        self.owner_loads: OwnerLoads = {}
        self.known: Known = []
        """The parameters of each group, and their layouts."""

    def add(self, group: dict[str, Any]) -> None:
        """Give a group's parameters their places and its matrices owners.

        Collective over the meshes of the parameters. Where it raises, no matrix has an owner more.
        """
        loads = {ranks: dict(each) for ranks, each in self.owner_loads.items()}
        traffic = []
        if isinstance(RULES[group["rule"]], MatrixRule):
            alike: dict[MeshAxes | None, list[Tensor]] = {}
            for parameter in group["params"]:
                alike.setdefault(layout_key(parameter), []).append(parameter)
            for parameters in alike.values():
                shapes = [
                    MatrixShape(tuple(p.shape), group["flatten"], group["split"])
                    for p in parameters
                ]
                traffic.append(
                    MatrixTraffic(parameters, shapes, loads, self.mesh_groups, self.matrix_dtype)
                )
        for parameter in group["params"]:
            self.places[parameter] = len(self.places)
            self.shard_sum.add(parameter)
        self.agreement.cover(self.places)
        self.traffic += traffic
        self.owner_loads = loads
        self.known += known_parameters([group])

    def products_of(self, parameters: Sequence[Tensor], products: list[Tensor]) -> list[Tensor]:
        """Return those of `products`, which are in the order of `places`, that `parameters` have."""
        return [products[self.places[parameter]] for parameter in parameters]
