"""Schedules at their corners."""

import math

import pytest

from torchmars.optim import lr_factor


def test_warmup_then_each_decay():
    for name in ("cosine", "linear", "constant", "wsd"):
        options = dict(name=name, warmup_steps=10, floor=0.1) | (
            {"decay_steps": 20} if name == "wsd" else {}
        )
        assert [lr_factor(step, 110, **options) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
        assert lr_factor(110, 110, **options) == pytest.approx(1.0 if name == "constant" else 0.1)
    assert lr_factor(60, 110, name="cosine", warmup_steps=10, floor=0.1) == pytest.approx(0.55)
    assert lr_factor(35, 110, name="cosine", warmup_steps=10) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )
    assert lr_factor(35, 110, name="linear", warmup_steps=10, floor=0.2) == pytest.approx(0.8)
    assert [
        lr_factor(step, 110, name="wsd", warmup_steps=10, decay_steps=20) for step in (90, 100, 110)
    ] == [1.0, 0.5, 0.0]


def test_the_decay_may_follow_a_power():
    wsd = dict(name="wsd", warmup_steps=10, decay_steps=16, floor=0.2, power=0.5)
    assert [lr_factor(step, 110, **wsd) for step in (94, 98, 103, 110)] == pytest.approx(
        [1.0, 0.2 + 0.8 * 0.5, 0.2 + 0.8 * 0.25, 0.2]
    )
    assert lr_factor(60, 110, name="linear", warmup_steps=10, power=2.0) == pytest.approx(0.75)
    assert lr_factor(60, 110, name="linear", power=1.0) == lr_factor(60, 110, name="linear")


def test_a_run_shorter_than_its_warmup():
    assert lr_factor(5, 5, warmup_steps=10) == 0.5
