"""From the trials of a comparison to its results."""

import itertools
import statistics
from collections.abc import Callable

from torchmars.comparison.contenders import Contender
from torchmars.comparison.results import (
    Comparison,
    ContenderResult,
    Difference,
    Estimate,
    TrialResult,
)
from torchmars.comparison.statistics import difference, needed, saved
from torchmars.comparison.study import Study, Trial, TrialPlan


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
    training = study.base.training
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
        [each for name in plans for each in trials[name]],
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
    tokens, remark = None, ""
    if contender.name == baseline:
        remark = "the others' savings are measured by it"
    elif baseline is not None:
        tokens, remark = savings(own, baseline, repeats[baseline])
    return ContenderResult(
        contender.name,
        contender.rule,
        plan.best,
        plan.edges,
        losses,
        statistics.fmean(losses) if losses else None,
        statistics.stdev(losses) if len(losses) > 1 else None,
        tokens,
        remark,
    )


def savings(
    repeats: list[TrialResult], name: str, baseline: list[TrialResult]
) -> tuple[Estimate | None, str]:
    """Return the share of tokens saved, and why it is not known.

    Trials with the same seed read the same data, so each is compared with the baseline's, which is
    called `name`, of its own seed.
    """
    of_seed = {each.seed: each.curve for each in baseline}
    pairs = [(each.curve, of_seed[each.seed]) for each in repeats if each.seed in of_seed]
    if not pairs:
        return None, f"no seed with which both it and {name} are done"
    shares = [share for own, other in pairs if (share := needed(own, other)) is not None]
    if missed := len(pairs) - len(shares):
        seeds = f" with {missed} of {len(pairs)} seeds" if shares else ""
        return None, f"it stays above {name}'s loss{seeds}"
    return saved(shares), ""


def differences(contenders: list[ContenderResult], baseline: str | None) -> list[Difference]:
    """Return the differences of those with a result: from the baseline first, then of the others.

    Of a pair without the baseline the first is the one that comes first in `contenders`.
    """
    known = [each for each in contenders if each.losses]
    measure = [each for each in known if each.name == baseline]
    others = [each for each in known if each.name != baseline]
    pairs = [*itertools.product(others, measure), *itertools.combinations(others, 2)]
    return [difference(one.name, one.losses, other.name, other.losses) for one, other in pairs]
