"""The schedule of a pipeline: its passes, its waits, and the memory of each rank."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torchmars.config import ActivationCheckpointConfig
from torchmars.planning.memory import Effect

# Forward; backward; gradients of inputs only; gradients of weights only.
ActionKind = Literal["F", "B", "I", "W"]
# The work of each, in forward passes.
COSTS: dict[ActionKind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
# The cost that activation checkpointing adds to a backward pass. "selective" keeps the dear
# results.
COMPUTED_AGAIN = {"none": 0.0, "full": 1.0, "selective": 0.2}


class Action(NamedTuple):
    """A pass of one microbatch through one stage."""

    kind: ActionKind
    stage: int
    microbatch: int


# For each stage of a rank, each kind of pass of it, and the first such pass that makes gradients of
# weights or takes their memory (0), the last one (-1), and all between them (1).
Effects = Mapping[tuple[int, ActionKind, int], Effect]


def computed_again(config: ActivationCheckpointConfig) -> float:
    """Return the cost that activation checkpointing adds to a backward pass, in forward passes."""
    return COMPUTED_AGAIN[config.mode]


def actions_of_ranks(schedule: Any) -> list[list[Action]]:
    """Return the passes of each rank of a pipeline, in order, from a schedule of torch's."""
    return [_actions(order) for _, order in sorted(schedule.pipeline_order.items())]


def _actions(order: Sequence[Any]) -> list[Action]:
    actions = [
        Action(action.computation_type.value, action.stage_index, action.microbatch_index)
        for each in order
        for action in (() if each is None else each.sub_actions or (each,))
        if action.computation_type.value in COSTS
    ]
    # torch (2.11 to 2.13) numbers the forward passes of the last stage of 1F1B from 1.
    first = {
        stage: min(each.microbatch for each in actions if each[:2] == ("F", stage))
        for stage in {action.stage for action in actions}
    }
    return [
        each._replace(microbatch=each.microbatch - first[each.stage]) if each.kind == "F" else each
        for each in actions
    ]


def bubble(
    ranks: Sequence[Sequence[Action]], costs: Sequence[float], computed_again: float = 0.0
) -> float:
    """Return the part of a step that ranks wait for each other, their mean.

    `ranks` are the passes of each rank, and `costs` those of a forward pass of each stage. A
    backward pass costs twice that, half of it for the weights; and `computed_again` forward passes
    more. Sending costs nothing.
    """
    works = COSTS | {"B": COSTS["B"] + computed_again}
    ends: dict[Action, float] = {}
    clocks, places = [0.0] * len(ranks), [0] * len(ranks)
    while any(place < len(actions) for place, actions in zip(places, ranks)):
        before = sum(places)
        for rank, actions in enumerate(ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                starts = [
                    max((ends[each] for each in ones if each in ends), default=math.inf)
                    for ones in _needed(action, len(costs))
                ]
                if (start := max([clocks[rank], *starts])) == math.inf:
                    break
                clocks[rank] = start + works[action.kind] * costs[action.stage]
                ends[action] = clocks[rank]
                places[rank] += 1
        assert sum(places) > before, "the passes of a pipeline wait for each other"
    busy = sum(works[action.kind] * costs[action.stage] for action in ends)
    return 1 - busy / (len(ranks) * max(clocks))


def _needed(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Return the passes that must precede a pass: one of each tuple."""
    kind, stage, microbatch = action
    if kind == "F":
        return [(Action("F", stage - 1, microbatch),)] if stage else []
    if kind == "W":
        return [(Action("I", stage, microbatch),)]
    if stage == stages - 1:
        return [(Action("F", stage, microbatch),)]
    return [(Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch))]


def peak_of(actions: Sequence[Action], effects: Effects) -> Counter[str]:
    """Return a rank's memory at the worst moment of its passes, in bytes by kind."""
    level: Counter[str] = Counter()
    worst: Counter[str] = Counter()
    places: dict[tuple[int, bool], list[Action]] = {}
    for action in actions:
        places.setdefault((action.stage, action.kind == "F"), []).append(action)
    for action in actions:
        kind, stage, _ = action
        # Passes that make gradients of weights; for forward passes, those that gather weights.
        alike = [each for each in places[stage, kind == "F"] if each.kind != "I"]
        which = 0 if action == alike[0] else -1 if action == alike[-1] else 1
        effect = effects[stage, kind, which]
        moment = level.copy()
        moment.update(effect.peak)
        worst = max(worst, moment, key=lambda each: sum(each.values()))
        level.update(effect.change)
    return worst
