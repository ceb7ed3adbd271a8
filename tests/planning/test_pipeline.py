"""How long the ranks of a pipeline wait, against the closed formula."""

import pytest

from torchmars.config import ActivationCheckpointConfig
from torchmars.planning.pipeline import Action, bubble, computed_again


def one_stage_each(ranks, microbatches, name):
    """The passes of each rank of GPipe or 1F1B, which has one stage."""
    orders = []
    for rank in range(ranks):
        forward = [Action("F", rank, number) for number in range(microbatches)]
        backward = [Action("B", rank, number) for number in range(microbatches)]
        first = microbatches if name == "GPipe" else min(microbatches, ranks - rank - 1)
        order = forward[:first]
        for number, each in enumerate(backward):
            order += [*forward[first + number : first + number + 1], each]
        orders.append(order)
    return orders


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks,microbatches", [(2, 2), (4, 4), (4, 12), (8, 9)])
def test_bubble_of_equal_stages(ranks, microbatches, name, mode):
    """(p - 1) / (n + p - 1): Narayanan et al. 2021, section 2.2, as a part of the whole step."""
    again = computed_again(ActivationCheckpointConfig(mode))
    waiting = bubble(one_stage_each(ranks, microbatches, name), [1.0] * ranks, again)
    assert waiting == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_bubble_of_a_costlier_stage():
    """Two ranks, one microbatch, costs 1 and 3: each works while the other waits."""
    orders = one_stage_each(2, 1, "GPipe")
    assert bubble(orders, [1.0, 3.0]) == pytest.approx(1 - 12 / (2 * 12))


def test_what_a_backward_pass_computes_again():
    assert [computed_again(ActivationCheckpointConfig(mode)) for mode in ("none", "full")] == [0, 1]
    # Waiting for a backward pass of 3 instead of 2, one of two ranks is idle all the same.
    last = [[Action("F", 0, 0), Action("B", 0, 0)]]
    assert bubble(last, [1.0], 1.0) == 0
