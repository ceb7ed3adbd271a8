"""The update rules: one file for each family, and the table of all of them."""

from collections.abc import Iterable, Sequence

from torchmars.optim.rules.adamw import AdamW, MarsAdamW
from torchmars.optim.rules.lion import Lion, MarsLion
from torchmars.optim.rules.matrix import MarsM, MarsShampoo, Muon
from torchmars.optim.rules.rule import Rule

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (MarsAdamW(), MarsLion(), MarsShampoo(), MarsM(), AdamW(), Lion(), Muon())
}

DROPPED = ("last_grad_squared_norm",)
"""Names of state tensors that earlier releases kept, and that are not read."""


def state_fits(rule: str, wanted: Iterable[str], saved_rule: str, saved: Iterable[str]) -> bool:
    """Return whether `rule` can go on from state of the names `saved` that `saved_rule` left.

    Moving averages mean the same under every rule that keeps them. A lean "momentum" fits its own
    rule only. A last gradient may be missing: it is started anew.
    """
    missing = set(wanted) - set(saved)
    return missing <= {"last_grad"} and ("momentum" not in wanted or rule == saved_rule)


def current_name(rule: str, saved_name: str) -> str:
    """Return today's name of a state tensor of `rule` that was saved as `saved_name`."""
    former = RULES[rule].former_names if rule in RULES else {}
    return former.get(saved_name, saved_name)


def unscaling(rule: str, betas: Sequence[float]) -> float:
    """Return what a buffer of a former name that was saved under `betas` is multiplied by.

    0 where its scale was 0: nothing is left of the buffer then, and nothing depends on it.
    """
    scale = RULES[rule].former_scale(betas)
    return 1 / scale if scale else 0.0
