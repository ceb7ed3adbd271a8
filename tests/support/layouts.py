"""Layouts that tests run on: ranks, and the settings of [parallelism], by a short name."""

SCHEDULES = {
    "": {},
    " GPipe": {"pp_schedule": "GPipe"},
    " Interleaved1F1B": {"pp_schedule": "Interleaved1F1B"},
    " InterleavedZeroBubble": {"pp_schedule": "InterleavedZeroBubble"},
    " ZBVZeroBubble": {"pp_schedule": "ZBVZeroBubble"},
    " DualPipeV": {"pp_schedule": "DualPipeV"},
}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1 rank": (1, {}),
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
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


def by_ranks(names: list[str]) -> dict[int, list[str]]:
    """Return the names of layouts by their number of ranks."""
    sizes = sorted({LAYOUTS[name][0] for name in names})
    return {size: [name for name in names if LAYOUTS[name][0] == size] for size in sizes}
