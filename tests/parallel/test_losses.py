"""The loss does not know the layout: the same run, by the trainer itself, on all of them."""

import pytest

from tests.support.layout_losses import MODELS, losses_apart
from tests.support.layouts import LAYOUTS
from tests.support.tiny import write_text

OTHERS = [layout for layout in LAYOUTS if layout != "1 rank"]


def test_losses_are_those_of_one_rank(tmp_path):
    """Each of these runs beside data parallelism, which tests/training has."""
    write_text(tmp_path)
    cases = [("Llama", "mars-m"), ("GPT-2", "mars-adamw, exact")]
    apart = losses_apart(tmp_path, cases, ["TP 2 x CP 2", "PP 2 x FSDP 2"])
    assert len(apart) == 4
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m", "mars-adamw, exact"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_on_every_layout(model, rule, tmp_path):
    write_text(tmp_path)
    apart = losses_apart(tmp_path, [(model, rule)], OTHERS)
    assert max(apart.values()) < 1e-5, apart
