"""The CPU cores that a process may use, of which a container may have fewer than its machine."""

import contextlib
import math
import os
from pathlib import Path, PurePath


def own_cores(system: Path = Path("/")) -> int:
    """Return the CPU cores that this process may use: at least 1.

    They are the least of its affinity and of the quotas of its control group and of those above,
    rounded down. `system` is the folder that has /proc and /sys.
    """
    least = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # a system that does not tell
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 2 names none. By version 1, time has groups of its own. A container may see
            # its group at the root, and under none of its names.
            if not controllers or "cpu" in controllers.split(","):
                group = PurePath(controllers) / path.lstrip("/")
                for each in (group, *group.parents):
                    least = min(least, quota_of(system / "sys/fs/cgroup" / each))
    return max(1, int(least))


def quota_of(group: Path) -> float:
    """Return how many cores' time a control group may use, by version 2 or 1."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # there is no such file; "max"
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
    return math.inf
