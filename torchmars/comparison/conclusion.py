"""The conclusion of a comparison in a few sentences: the finding first, then how sure it is."""

from torchmars.comparison.rates import rates_in_words
from torchmars.comparison.results import Comparison, ContenderResult, Difference
from torchmars.comparison.words import interval_text, seeds_text, settings_text, share
from torchmars.core.words import number_or_dash


def conclusion(found: Comparison) -> list[str]:
    """Return the finding in sentences, and its uncertainty."""
    pending = any(trial.state == "pending" for trial in found.trials)
    ranked = [each for each in found.contenders if each.mean is not None]
    if not ranked:
        nothing = f"Nothing yet: no {found.kind} is tuned."
        return [nothing if pending else "Nothing: no trial is done."]
    best, others = ranked[0], ranked[1:]
    if found.kind == "size":
        first, *more = rates_in_words(found)
    else:
        first = finding(found, best, others[0] if others else None)
        more = of_the_others(found, best, others[1:])
    sentences = [f"So far: {first}" if pending else first, *more]
    if saved := share(best.tokens_saved):
        sentences.append(f"{best.name} saves {saved} of the tokens of {found.baseline}.")
    if len(found.seeds) == 1:
        sentences.append(
            f"There is {seeds_text(found.seeds)}: how far losses spread over seeds is not known."
        )
    return sentences


def finding(found: Comparison, best: ContenderResult, second: ContenderResult | None) -> str:
    """Return how the best contender stands to the one after it, if that has a result."""
    own, loss = tuned(found, best), number_or_dash(best.mean)
    if second is None:
        return f"{own} ends at {loss}; no other optimizer has a result."
    difference, other = found.between(best.name, second.name), tuned(found, second)
    if number_or_dash(abs(difference.loss.mean)) == number_or_dash(0.0):
        return f"{own} and {other} end at the same loss, {loss}."
    below = f"{number_or_dash(abs(difference.loss.mean))} below {other}"
    if difference.exceeds_spread is None:
        return f"{own} ends lowest, at {loss}, {below}."
    row = difference_text(difference)
    if difference.exceeds_spread:
        return f"{own} ends lowest, at {loss}, {below}; {row}, beyond the spread."
    return f"No difference that these seeds show: {own} ends at {loss}, {below}; {row}."


def of_the_others(
    found: Comparison, best: ContenderResult, others: list[ContenderResult]
) -> list[str]:
    """Return sentences on those that come after the second."""
    ways = {
        True: "Beyond the spread it is below",
        False: "No difference is shown to",
        None: "It is also below",
    }
    sentences = []
    for exceeds, words in ways.items():
        known = [(each, found.between(best.name, each.name)) for each in others]
        gaps = [
            f"{each.name} ({difference_text(difference)})"
            for each, difference in known
            if difference.exceeds_spread is exceeds
        ]
        if gaps:
            sentences.append(f"{words} {', '.join(gaps)}.")
    return sentences


def difference_text(row: Difference) -> str:
    """Return a row of the table of differences, with its sign, as a clause."""
    interval = interval_text(row.loss)
    mean = f"{row.first} - {row.second} is {row.loss.mean:+z.4f}"
    return f"{mean}, 95% interval {interval}" if interval else mean


def tuned(found: Comparison, contender: ContenderResult) -> str:
    """Return the name of a contender with its best settings."""
    return f"{contender.name} ({settings_text(contender.best, found.tuned)})"
