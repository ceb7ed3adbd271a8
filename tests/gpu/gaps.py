"""When the GPU does nothing in a step, and what the host does meanwhile."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tests.gpu.device import ON_GPU
from tests.gpu.timing import Step, synchronize

MOST = 8  # rows of each kind
BETWEEN = "Python between operations"


class Gap(NamedTuple):
    """A time in which the device does nothing, and the kernels around it."""

    start: float
    end: float
    after: str
    before: str


class Host:
    """The operations of the host, each within another one or outermost."""

    def __init__(self, events: Sequence[Any]) -> None:
        places = {id(event): place for place, event in enumerate(events)}
        ranges = [event.time_range for event in events]
        self.starts = torch.tensor([each.start for each in ranges], dtype=torch.float64)
        self.ends = torch.tensor([each.end for each in ranges], dtype=torch.float64)
        parents = [places.get(id(event.cpu_parent), len(events)) for event in events]
        self.parents = torch.tensor(parents, dtype=torch.long)
        self.names = [named(event) for event in events]

    def during(self, start: float, end: float) -> str:
        """Return the operation that took most of a time, without those within it.

        It comes after the outermost one that it is in.
        """
        times = (self.ends.clamp(max=end) - self.starts.clamp(min=start)).clamp(min=0)
        within = times.new_zeros(len(times) + 1).index_add_(0, self.parents, times)
        own = times - within[:-1]
        if not len(own) or own.max() <= end - start - within[-1]:
            return BETWEEN
        return self.names[int(own.argmax())]


def named(event: Any) -> str:
    """Return the names of an operation and of the outermost one that it is in."""
    outer = event
    while outer.cpu_parent is not None:
        outer = outer.cpu_parent
    inner = "" if outer is event else f" > {event.name[:60]}"
    return outer.name[:60] + inner


def gaps_between(kernels: Iterable[tuple[float, float, str]]) -> tuple[float, list[Gap]]:
    """Return how long kernels of (start, end, name) run, of several at once one, and the gaps."""
    (first, free, last), *others = sorted(kernels)
    found = []
    for start, end, name in others:
        if start > free:
            found.append(Gap(free, start, last, name))
        if end > free:
            free, last = end, name
    return free - first - sum(gap.end - gap.start for gap in found), found


def gaps(step: Step, steps: int) -> list[dict[str, Any]]:
    """Return how long the GPU is busy and idle in a step, and what the host does while it is idle.

    Of `steps` in a row, under the profiler, which slows the host: first of a step in all, then idle
    time by what the host did, then the longest gaps.
    """
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        synchronize()
    events = profile.events()
    device_type = DeviceType.CUDA if ON_GPU else DeviceType.CPU
    busy, found = gaps_between(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type == device_type and not event.is_user_annotation
    )
    host = Host([event for event in events if event.device_type == DeviceType.CPU])
    idle: dict[str, list[float]] = defaultdict(list)
    for gap in found:
        idle[host.during(gap.start, gap.end)].append((gap.end - gap.start) / 1e3)
    by_host = sorted(((sum(each), len(each), name) for name, each in idle.items()), reverse=True)
    longest = sorted(found, key=lambda gap: gap.start - gap.end)[:MOST]
    return [
        {
            "profiled: busy, ms": busy / 1e3 / steps,
            "idle, ms": sum(total for total, *_ in by_host) / steps,
            "gaps": len(found) / steps,
        },
        *(
            {"idle while the host is in": name, "ms": total / steps, "gaps": count / steps}
            for total, count, name in by_host[:MOST]
        ),
        *(
            {
                "gap, ms": (gap.end - gap.start) / 1e3,
                "host": host.during(gap.start, gap.end),
                "after": gap.after[:60],
                "before": gap.before[:60],
            }
            for gap in longest
        ),
    ]
