"""The final losses of a comparison over betas and gamma: a plane for each contender."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from torchmars.comparison.results import Comparison, ContenderResult, TrialResult
from torchmars.comparison.words import value_text
from torchmars.core.words import number_or_dash

SETTINGS = ("betas", "gamma")
ORDER = {"done": 0, "pending": 1}  # of the trials at one point; those that are lost come last
# A loss that is so many times farther above the lowest one than the median is has the last shade.
FARTHEST = 4.0


@dataclass(frozen=True)
class Plane:
    """The trials of a contender with the first seed: at each point the best of other settings."""

    contender: ContenderResult
    betas: list[str]
    """The values of the rows; one that is empty if betas are not in the grid."""
    gammas: list[str]
    """The values of the columns; one that is empty for a rule without gamma."""
    points: dict[tuple[str, str], TrialResult]
    """By betas and gamma: the lowest loss, or a trial that has not ended, or one that is lost."""


def planes_of(found: Comparison) -> list[Plane]:
    """Return the planes of all contenders; none where neither betas nor gamma has two values."""
    several = set(SETTINGS) & set(found.tuned)
    return [plane_of(found, each) for each in found.contenders] if several else []


def plane_of(found: Comparison, contender: ContenderResult) -> Plane:
    """Return the plane of a contender."""
    points: dict[tuple[str, str], list[TrialResult]] = {}
    for trial in found.trials:
        if trial.contender == contender.name and trial.seed == found.seeds[0]:
            given = trial.settings
            betas, gamma = (value_text(given[name]) if name in given else "" for name in SETTINGS)
            points.setdefault((betas, gamma), []).append(trial)
    rows, columns = (list(dict.fromkeys(values)) for values in zip(*points))

    def order(trial: TrialResult) -> tuple[int, float]:
        return ORDER.get(trial.state, len(ORDER)), trial.loss or 0.0

    best = {point: min(trials, key=order) for point, trials in points.items()}
    return Plane(contender, rows, columns, best)


def text_at(trial: TrialResult) -> str:
    """Return the mark of a picture at a point: a loss, a cross if there is none, or nothing yet."""
    return {"done": number_or_dash(trial.loss), "pending": ""}.get(trial.state, "×")


def shading(planes: list[Plane]) -> Callable[[TrialResult], float]:
    """Return a function to the shade of a trial: 0 for the lowest loss of all planes, up to 1.

    Shades follow the root of the distance to the lowest loss, so that small ones are seen beside
    large ones.
    """
    losses = [
        each.loss for plane in planes for each in plane.points.values() if each.loss is not None
    ]
    lowest, highest = min(losses, default=0.0), max(losses, default=0.0)
    median = statistics.median(losses) if losses else 0.0
    far = min(FARTHEST * (median - lowest), highest - lowest)

    def shade(trial: TrialResult) -> float:
        above = math.inf if trial.loss is None else trial.loss - lowest
        return math.sqrt(above / far) if above < far else float(above > 0)

    return shade
