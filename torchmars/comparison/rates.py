"""The best learning rate of each size of a model, and what the rate of the base costs it."""

import math

from torchmars.comparison.results import Comparison, Settings
from torchmars.core.words import number_or_dash

HEADINGS = ["size", "best rate", "over seeds", "lowest loss", "lost at the base's rate"]


def rate_rows(found: Comparison) -> list[list[str]]:
    """Return a row for each size after the headings: its best rate, and what the base's costs.

    A best rate is where a parabola through the lowest loss and its neighbours, over the rate's
    logarithm, is lowest. "lost at the base's rate": by how much the loss at the base's best rate of
    the grid is above the lowest one.
    """
    base_rate = best_of(losses_of(found, found.names[0], found.seeds[0]))
    rows = [HEADINGS]
    for name in found.names:
        losses = losses_of(found, name, found.seeds[0])
        own, *others = (lowest(losses_of(found, name, seed)) for seed in found.seeds)
        known = [rate for rate in (own, *others) if rate is not None]
        spread = f"{min(known):.3g} to {max(known):.3g}" if len(known) > 1 else "-"
        least = min(losses.values(), default=None)
        of_base = None if base_rate is None else losses.get(base_rate)
        lost = None if least is None or of_base is None else of_base - least
        rate = number_or_dash(own, ".3g")
        rows.append([name, rate, spread, number_or_dash(least), number_or_dash(lost)])
    return rows


def rates_in_words(found: Comparison) -> list[str]:
    """Return the best rate of the base in a sentence, and of the other sizes in another one."""
    rates = {name: lowest(losses_of(found, name, found.seeds[0])) for name in found.names}
    base, *others = rates
    of_base = rates[base]
    if of_base is None:
        done = losses_of(found, base, found.seeds[0])
        why = "its lowest loss is at an end of the rates" if done else "no trial of it is done"
        return [f"{base}, the base, has no best rate: {why}."]
    times = {name: rate and f"{rate / of_base:.2f} times that" for name, rate in rates.items()}
    said = ", of ".join(f"{name} it is {times[name] or 'not known'}" for name in others)
    return [f"{base}, the base, is best at the rate {of_base:.3g}.", f"Of {said}."]


def losses_of(found: Comparison, name: str, seed: int) -> dict[float, float]:
    """Return the lowest loss of each rate that is done, of a size with a seed, by rate."""
    losses: dict[float, float] = {}
    for each in found.trials:
        if each.contender == name and each.seed == seed and each.loss is not None:
            rate = rate_of(each.settings)
            losses[rate] = min(each.loss, losses.get(rate, math.inf))
    return dict(sorted(losses.items()))


def best_of(losses: dict[float, float]) -> float | None:
    """Return the rate of the lowest loss; None for none."""
    return min(losses, key=lambda rate: losses[rate], default=None)


def lowest(losses: dict[float, float]) -> float | None:
    """Return the rate at which a parabola through the three lowest points in a row is lowest.

    It is over the logarithm of the rate. None where the lowest loss is at an end.
    """
    rates = list(losses)
    place = rates.index(best) if (best := best_of(losses)) is not None else 0
    if not 0 < place < len(rates) - 1:
        return None
    (x0, y0), (x1, y1), (x2, y2) = (
        (math.log(rate), losses[rate]) for rate in rates[place - 1 : place + 2]
    )
    left, right = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    if left == right:  # three equal losses
        return rates[place]
    return math.exp(x1 - ((x1 - x0) * left - (x1 - x2) * right) / (2 * (left - right)))


def rate_of(settings: Settings) -> float:
    """Return the learning rate among the settings of a trial."""
    lr = settings["lr"]
    assert isinstance(lr, float)
    return lr
