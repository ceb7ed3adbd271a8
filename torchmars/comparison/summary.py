"""From the trials of a comparison to its results."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable

from torchmars.comparison.contenders import BASELINE, CONTROL, Contender
from torchmars.comparison.results import (
    Axis,
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    TrialResult,
)
from torchmars.comparison.statistics import difference, needed, saved
from torchmars.comparison.study import Study, Trial, TrialPlan
from torchmars.comparison.trials import CONFIG_FILE
from torchmars.optim.rules import variance_reduced

SAID = {"betas[0]": "the first of betas", "betas[1]": "the second of betas"}


def summarise(study: Study, result: Callable[[Trial], TrialResult]) -> Comparison:
    """Return the results of the trials that have ended."""
    plans = {each.name: study.plan(each, result) for each in study.contenders}
    trials = {name: [result(trial) for trial in plan.trials] for name, plan in plans.items()}
    repeats = {
        name: [each for each in trials[name] if each.settings == plan.best and each.state == "done"]
        for name, plan in plans.items()
    }
    contenders = [
        contender_result(each, plans[each.name], repeats, study.baseline)
        for each in study.contenders
    ]
    contenders.sort(key=lambda each: (each.mean is None, each.mean or 0.0))
    training, rows = study.base.training, [each for name in plans for each in trials[name]]
    return Comparison(
        study.folder.name,
        study.arguments,
        study.grid,
        study.seeds,
        training.steps,
        training.tokens,
        study.baseline,
        contenders,
        differences(contenders, study.baseline) if study.kind == "optimizer" else [],
        rows,
        notes(study, contenders, rows),
        study.kind,
    )


def contender_result(
    contender: Contender,
    plan: TrialPlan,
    repeats: dict[str, list[TrialResult]],
    baseline: str | None,
) -> ContenderResult:
    """Return the results of a contender.

    `repeats` are the trials of the best settings that are done, by contender.
    """
    own = repeats[contender.name]
    losses = [each.loss for each in own if each.loss is not None]
    tokens, seconds, remark = None, None, ""
    if contender.name == baseline:
        remark = "the others' savings are measured by it"
    elif baseline is not None:
        tokens, seconds, remark = savings(own, baseline, repeats[baseline])
    return ContenderResult(
        contender.name,
        contender.rule,
        plan.best,
        plan.edges,
        losses,
        statistics.fmean(losses) if losses else None,
        statistics.stdev(losses) if len(losses) > 1 else None,
        tokens,
        seconds,
        remark,
    )


def savings(
    repeats: list[TrialResult], name: str, baseline: list[TrialResult]
) -> tuple[Estimate | None, Estimate | None, str]:
    """Return the shares of tokens and of seconds saved, and why they are not known.

    Trials with the same seed read the same data, so each is compared with the baseline's, which is
    called `name`, of its own seed.
    """
    of_seed = {each.seed: each.curve for each in baseline}
    pairs = [(each.curve, of_seed[each.seed]) for each in repeats if each.seed in of_seed]
    if not pairs:
        return None, None, f"no seed with which both it and {name} are done"

    def shares(axis: Axis) -> list[float]:
        found = [needed(own, other, axis) for own, other in pairs]
        return [each for each in found if each is not None]

    tokens = shares("tokens")
    if missed := len(pairs) - len(tokens):
        seeds = f" with {missed} of {len(pairs)} seeds" if tokens else ""
        return None, None, f"it stays above {name}'s loss{seeds}"
    return saved(tokens), saved(shares("seconds")), ""


def differences(contenders: list[ContenderResult], baseline: str | None) -> list[Difference]:
    """Return the differences of those with a result: from the baseline first, then of the others.

    Of a pair without the baseline the first is the one that comes first in `contenders`.
    """
    known = [each for each in contenders if each.losses]
    measure = [each for each in known if each.name == baseline]
    others = [each for each in known if each.name != baseline]
    pairs = [*itertools.product(others, measure), *itertools.combinations(others, 2)]
    return [difference(one.name, one.losses, other.name, other.losses) for one, other in pairs]


def notes(study: Study, contenders: list[ContenderResult], trials: list[TrialResult]) -> list[str]:
    """Return notes on the results that a reader must know."""
    found = []
    counts = Counter(each.state for each in trials)
    if counts["pending"]:
        found.append(f"{counts['pending']} of {len(trials)} trials have not ended yet.")
    ended = [f"{counts[state]} {state}" for state in ("failed", "diverged") if counts[state]]
    if ended:
        found.append(
            f"Of {len(trials)} trials {' and '.join(ended)}: the table of trials in table.md says "
            "why."
        )
    tried = {file.parent.name for file in study.folder.glob(f"trials/*/{CONFIG_FILE}")}
    if not counts["pending"] and (left_out := len(tried - {each.name for each in trials})):
        found.append(
            f"{left_out} of the trials in this folder are not in these tables, since the command "
            f"does not name their {study.kind}s, settings or seeds. Name these to have them back."
        )
    for each in contenders:
        repeats = [t for t in trials if t.contender == each.name and t.settings == each.best]
        lost = [t for t in repeats if t.state in ("failed", "diverged")]
        if lost:
            found.append(
                f"With its best settings {each.name} has no result of {len(lost)} of "
                f"{len(repeats)} seeds. Its mean and spread are those of the others, which "
                "flatters it."
            )
    at_edge = [
        f"{each.name} " + ", ".join(f"{SAID.get(at, at)} ({end})" for at, end in each.edges.items())
        for each in contenders
        if each.edges
    ]
    if at_edge:
        found.append(
            "A best value that is the lowest or the highest one tried may not be tuned: "
            f"{'; '.join(at_edge)}."
        )
    if study.kind == "optimizer" and study.baseline is None and len(study.contenders) > 1:
        found.append(
            f"No savings are measured, since {BASELINE} does not take part. The same command with "
            f"--baseline {study.contenders[0].name} measures the others against that; it trains "
            "nothing again."
        )
    names = [each.name for each in study.contenders]
    takes_mars = any(variance_reduced(each.rule) for each in study.contenders)
    if takes_mars and BASELINE in names and CONTROL not in names and "betas" not in study.grid:
        found.append(
            f"{CONTROL}, AdamW with MARS's betas, does not take part. Without that control a gain "
            "of MARS may be one of its betas."
        )
    return found
