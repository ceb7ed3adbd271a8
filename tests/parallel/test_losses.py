"""The loss does not know the layout: the same run, by the trainer itself, on all of them."""

import pytest

from tests.support.full import FULL
from tests.support.layout_losses import MODELS, losses_apart
from tests.support.layouts import LAYOUTS
from tests.support.tiny import write_text

OTHERS = [layout for layout in LAYOUTS if layout != "1 rank"]


def test_losses_are_those_of_one_rank(tmp_path):
    """tests/training has data parallelism."""
    write_text(tmp_path)
    apart = losses_apart(tmp_path, [("GPT-2", "mars-m")], ["TP 2", "CP 2", "PP 2"], steps=10)
    assert len(apart) == 3 and max(apart.values()) < 1e-5, apart


@FULL
def test_losses_of_layouts_of_two_kinds_are_those_of_one_rank(tmp_path):
    write_text(tmp_path)
    cases = [("Llama", "mars-m"), ("GPT-2", "mars-adamw, exact")]
    apart = losses_apart(tmp_path, cases, ["TP 2 x CP 2", "PP 2 x FSDP 2"])
    assert len(apart) == 4 and max(apart.values()) < 1e-5, apart


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m", "mars-adamw, exact"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_on_every_layout(model, rule, tmp_path):
    write_text(tmp_path)
    apart = losses_apart(tmp_path, [(model, rule)], OTHERS)
    assert max(apart.values()) < 1e-5, apart
