"""The results of a benchmark, as tables and as JSON."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmars.benchmark.measure import Measurement
from torchmars.core.tables import table
from torchmars.core.words import number_or_dash


@dataclass
class Spread:
    """The median of the numbers of several rounds, and their range."""

    median: float
    lowest: float
    highest: float

    def describe(self, pattern: str) -> str:
        """Return it in words, numbers formatted by `pattern`; without a range that is none."""
        text = format(self.median, pattern)
        if self.lowest == self.highest:
            return text
        return f"{text} ({format(self.lowest, pattern)} to {format(self.highest, pattern)})"


def spread(values: list[float]) -> Spread:
    """Return the spread of the numbers of several rounds."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass
class MeasuredConfig:
    """A config that is measured."""

    name: str
    """Its name in the table; empty if it is the only one."""
    arguments: str
    """The files and options that it is made of."""
    ranks: int
    data: str
    rounds: list[Measurement] = field(default_factory=list)

    def rate(self) -> Spread:
        """Return its tokens per second."""
        return spread([each.tokens_per_second for each in self.rounds])

    def median(self, measure: Callable[[Measurement], float | None]) -> float | None:
        """Return the median over the rounds of a `measure` of each; None if none is known."""
        known = [value for value in map(measure, self.rounds) if value is not None]
        return statistics.median(known) if known else None


def ratios(first: MeasuredConfig, second: MeasuredConfig) -> Spread:
    """Return the ratio of `first`'s tokens per second to `second`'s in the same round."""
    pairs = zip(first.rounds, second.rounds)
    return spread([one.tokens_per_second / other.tokens_per_second for one, other in pairs])


def bench_table(measured: list[MeasuredConfig]) -> list[str]:
    """Return a column for each config: rate, use of the GPUs, time of a step, memory."""

    def row(name: str, pattern: str, measure: Callable[[Measurement], float | None]) -> list[str]:
        return [name, *(number_or_dash(each.median(measure), pattern) for each in measured)]

    phases = {
        phase: None for each in measured for found in each.rounds for phase in found.phases_ms
    }
    rows = [
        *([["", *(each.name for each in measured)]] if len(measured) > 1 else []),
        ["tokens/s", *(each.rate().describe(",.0f") for each in measured)],
        row("mfu", ".1%", lambda found: found.mfu),
        row("step, ms", ",.1f", lambda found: found.step_ms),
        *(
            [f"  {phase}", *(phase_text(each, phase) for each in measured)]
            for phase in sorted(phases, key="other".__eq__)
        ),
        row("peak memory of rank 0, GiB", ".2f", lambda found: found.memory_gib),
    ]
    return table(rows, right=range(1, len(measured) + 1))


def phase_text(one: MeasuredConfig, phase: str) -> str:
    """Return the time of a phase, and which part of the step that is."""
    milliseconds = one.median(lambda found: found.phases_ms.get(phase))
    part = one.median(lambda found: found.phases_ms.get(phase, 0.0) / found.step_ms)
    return "-" if milliseconds is None else f"{milliseconds:,.1f} ({part:4.0%})"


def bench_results(
    measured: list[MeasuredConfig], machine: dict[str, Any], warmup: int, steps: int
) -> dict[str, Any]:
    """Return all that was measured, for a file of JSON."""
    values: dict[str, Any] = {"machine": machine, "warmup": warmup, "steps": steps}
    values["configs"] = [
        asdict(each) | {"tokens_per_second": asdict(each.rate())} for each in measured
    ]
    if len(measured) == 2:
        values["ratio"] = asdict(ratios(*measured))
    return values
