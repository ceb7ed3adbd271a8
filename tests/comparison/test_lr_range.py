"""The learning rate range test."""

import math
from dataclasses import replace

import pytest

from tests.support.tiny import tiny_config, write_config
from torchmars.comparison.lr_range import describe_range, read_losses, rising_run, with_lr
from torchmars.config import OptimizerConfig
from torchmars.config.load import load_config
from torchmars.config.optimizer import GroupConfig, PatternConfig


def test_a_valley_is_found():
    """Of a loss that falls as a logistic curve of log10(lr) about 1e-3, and explodes at 0.1."""
    lrs = [10 ** (-5 + number / 100) for number in range(601)]
    losses = [
        2 + 6 / (1 + math.exp(4 * (math.log10(lr) + 3))) + (100 * (lr - 0.1) if lr > 0.1 else 0)
        for lr in lrs
    ]
    found = describe_range(lrs, losses)
    assert found.smoothed[0] == losses[0] and len(found.smoothed) == len(lrs)
    # The smoothed loss is late by about 9 steps, a tenth of a decade.
    assert 0.09 < found.lowest < 0.13
    assert found.lowest < found.diverges < 0.15
    # The loss itself is 2% above its lowest at 10^-1.77: 6 / 0.043 = 1 + exp(4 (-1.77 + 3)).
    assert math.log10(found.enough) == pytest.approx(-1.77 + 0.09, abs=0.05)
    assert found.grid() == pytest.approx([found.enough * each for each in (0.25, 0.5, 1, 2)])


@pytest.mark.parametrize("steps", [12, 20, 40, 601])
def test_no_rate_that_diverges_is_proposed(steps):
    """However few steps the same valley is seen at. Losses that explode are not finite."""
    lrs = [10 ** (-5 + 6 * number / (steps - 1)) for number in range(steps)]
    below = [lr for lr in lrs if lr < 0.1]
    losses = [2 + 6 / (1 + math.exp(4 * (math.log10(lr) + 3))) for lr in below]
    found = describe_range(below, losses, end=lrs[len(below)])
    assert max(found.grid()) <= found.diverges / 2 and found.grid()[0] > 1e-3


def test_on_a_plateau_noise_does_not_say_which_rate():
    lrs = [10 ** (-4 + number / 50) for number in range(201)]
    losses = [max(3.0, 6 - 3 * number / 60) + 0.02 * (-1) ** number for number in range(201)]
    losses[190] -= 0.1  # luck, two decades beyond the rate from which the loss falls no more
    found = describe_range(lrs, losses, end=2.0)
    assert found.lowest > lrs[180] and lrs[60] < found.enough < lrs[90]
    assert found.diverges == 2.0


def test_a_loss_that_only_falls_diverges_nowhere_and_one_that_only_rises_has_a_grid():
    lrs = [10.0**number for number in range(-6, 6)]
    falls = describe_range(lrs, [float(12 - number) for number in range(12)])
    assert falls.diverges is None and falls.lowest == lrs[-1]
    rises = describe_range(lrs, [1.0 + number for number in range(12)])
    assert rises.lowest == lrs[0] and rises.diverges == lrs[1]


def test_all_rates_keep_their_ratio():
    section = replace(
        OptimizerConfig(name="mars-adamw").resolve(),
        lr=2e-3,
        lr_1d=1e-3,
        embedding=GroupConfig(lr=4e-3),
        groups=[PatternConfig(pattern="x", lr=6e-3), PatternConfig(pattern="y")],
    )
    found = with_lr(section, 1.0)
    assert (found.lr, found.lr_1d, found.embedding.lr) == pytest.approx((1.0, 0.5, 2.0))
    assert found.groups[0].lr == pytest.approx(3.0) and found.groups[1] == section.groups[1]
    assert found.matrix == section.matrix
    muon = OptimizerConfig(name="muon", lr=2e-3)
    assert with_lr(muon.resolve(), 1.0).lr_rest is None  # it follows lr
    assert with_lr(replace(muon, lr_rest=1e-3).resolve(), 1.0).lr_rest == pytest.approx(0.5)


def test_the_run_rises_from_low_to_high(tmp_path):
    config = tiny_config(
        tmp_path,
        schedule={"name": "wsd", "warmup_steps": 5, "min_lr": 1e-4},
        guards={"loss_spike": "skip"},
    )
    found = rising_run(config, 1e-5, 1.0, 30, tmp_path / "scratch")
    file = tmp_path / "lr.toml"
    write_config(found, file)
    assert load_config([str(file)], "test") == found
    assert found.training.steps == 30 and found.metrics.log_interval == 1
    assert found.schedule.name == "range_test" and found.guards.loss_spike == "off"


def test_losses_end_where_they_are_not_finite(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "train/loss": 5.0, "train/lr": 0.1}\n{"step": 1, "validation/loss": 4.0}\n'
        '{"step": 2, "train/loss": 4.0, "train/lr": 0.2}\n'
        '{"step": 3, "train/loss": null, "train/lr": 0.4}\n'
    )
    assert read_losses(file) == ([0.1, 0.2], [5.0, 4.0], 0.4)
    assert read_losses(tmp_path / "none") == ([], [], None)
