"""Layouts that tests run on: ranks, and the settings of [parallelism], by a short name."""

import torch
import torch.distributed as dist

from torchmars.config import ParallelismConfig
from torchmars.parallel.groups import make_groups, make_meshes
from torchmars.parallel.layout import Layout

SCHEDULES = {
    "": {},
    " GPipe": {"pp_schedule": "GPipe"},
    " Interleaved1F1B": {"pp_schedule": "Interleaved1F1B"},
}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1 rank": (1, {}),
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
    "HSDP 2x1": (2, {"dp_replicate": 2}),
    "HSDP 2x2": (4, {"dp_replicate": 2}),
    "TP 2": (2, {"tp": 2}),
    "TP 4": (4, {"tp": 4}),
    "FSDP 2 x TP 2": (4, {"tp": 2}),
    **{f"PP 2{name}": (2, {"pp": 2} | settings) for name, settings in SCHEDULES.items()},
    "PP 2 x FSDP 2": (4, {"pp": 2}),
    "CP 2": (2, {"cp": 2}),
    "CP 2 Ulysses": (2, {"cp": 2, "cp_method": "ulysses"}),
    "CP 2 x FSDP 2": (4, {"cp": 2}),
    "TP 2 x CP 2": (4, {"tp": 2, "cp": 2}),
    "TP 2 x CP 2 Ulysses": (4, {"tp": 2, "cp": 2, "cp_method": "ulysses"}),
    "PP 2 x TP 2": (4, {"pp": 2, "tp": 2}),
    "PP 2 x TP 2 x FSDP 2": (8, {"pp": 2, "tp": 2}),
}
# Those of experts, by the name of a layout of LAYOUTS or of these.
EXPERT_LAYOUTS: dict[str, tuple[int, dict]] = {
    "EP 2": (2, {"ep": 2}),
    "FSDP 4, EP 2": (4, {"ep": 2}),
    "EP 4": (4, {"ep": 4}),
    "HSDP 2x2, EP 2": (4, {"dp_replicate": 2, "ep": 2}),
    "TP 2, EP 2": (2, {"tp": 2, "ep": 2}),
    "FSDP 2 x TP 2, EP 2": (4, {"tp": 2, "ep": 2}),
    "FSDP 2 x TP 2, EP 4": (4, {"tp": 2, "ep": 4}),
    "CP 2, EP 2": (2, {"cp": 2, "ep": 2}),
    **{
        f"PP 2{name} x FSDP 2, EP 2": (4, {"pp": 2, "ep": 2} | settings)
        for name, settings in SCHEDULES.items()
    },
}
LAYOUTS_WITH_EXPERTS = LAYOUTS | EXPERT_LAYOUTS


def by_ranks(names: list[str]) -> dict[int, list[str]]:
    """Return the names of layouts by their number of ranks."""
    ranks = {name: LAYOUTS_WITH_EXPERTS[name][0] for name in names}
    return {
        size: [name for name in names if ranks[name] == size] for size in sorted({*ranks.values()})
    }


def simulated_layout(ranks):
    """The layout of the first of `ranks` ranks that do not exist: their collectives do nothing."""
    degrees = ParallelismConfig().degrees(ranks)
    dist.init_process_group("fake", rank=0, world_size=ranks)
    mesh, weights, experts = make_meshes("cpu", degrees)
    groups = make_groups(mesh, experts)
    return Layout(torch.device("cpu"), weights, experts, groups, dist.group.WORLD)
