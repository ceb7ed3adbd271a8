"""The second pass of a step: weights and state by every rule, while matrices travel."""

from collections.abc import Sequence

from torchmars.optim.exchange import Exchange
from torchmars.optim.plans import Plans
from torchmars.optim.rules.matrix import MatrixRule, MatrixStep, MatrixUpdate
from torchmars.optim.rules.rule import ElementwiseRule, GroupTensors, StepFactors


def update_groups(
    updates: Sequence[tuple[GroupTensors, StepFactors]], plans: Plans, *, overlap: bool
) -> None:
    """Update weights and state of all groups in place. Collective where matrices are sharded.

    `overlap` is that of `MARS`.
    """
    matrices = MatrixStep(
        [
            MatrixUpdate(group.rule, group, factors)
            for group, factors in updates
            if isinstance(group.rule, MatrixRule)
        ]
    )
    exchange = Exchange(plans.traffic, matrices, overlap=overlap)

    matrices.before_directions()
    exchange.start()
    for group, factors in updates:  # while matrices travel
        if isinstance(group.rule, ElementwiseRule):
            group.rule.update(group, factors)
    exchange.finish()
    matrices.after_directions()
