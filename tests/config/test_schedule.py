"""Schedules whose lengths do not fit the run: a warning that says what the rates will be."""

import pytest

from tests.support.tiny import tiny_tables, write_text
from torchmars.config.load import config_from_tables
from torchmars.optim import lr_factor

UNFIT = [
    ("cosine", 30, None),
    ("cosine", 20, None),
    ("linear", 21, None),
    ("constant", 21, None),
    ("wsd", 20, None),
    ("wsd", 17, None),  # by default the decay has 4
    ("wsd", 0, 21),
    ("wsd", 15, 6),
    ("wsd", 10**6, 10**6),
]
FIT = [
    ("cosine", 0, None),
    ("cosine", 19, None),
    ("constant", 20, None),
    ("wsd", 16, None),
    ("wsd", 14, 6),
    ("wsd", 0, 20),
    ("wsd", 10, 0),
]


def schedule_of(name, warmup, decay):
    section = {"name": name, "warmup_steps": warmup, "min_lr": 1e-6}
    section |= {} if decay is None else {"decay_steps": decay}
    tables = {"schedule": section, "training": {"steps": 20}}
    return config_from_tables(tables, "in a test").schedule


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_one_line_with_both_lengths(case):
    schedule = schedule_of(*case)
    said = schedule.warning(20)
    assert "\n" not in said and "training.steps = 20" in said
    assert f"schedule.warmup_steps = {case[1]:,}" in said
    if case[1] > 20:
        peak = lr_factor(
            20, 20, name=case[0], warmup_steps=case[1], decay_steps=schedule.decay_steps
        )
        assert f"reaches {peak:.0%} of optimizer.lr" in said


@pytest.mark.parametrize("case", FIT)
def test_what_fits_is_silent(case):
    assert schedule_of(*case).warning(20) == ""


def test_the_plan_and_the_run_warn_once(tmp_path, monkeypatch, capsys):
    import torchmars

    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 2}, schedule={"warmup_steps": 5})
    config = config_from_tables(tables, "in a test")
    line = "warning   schedule.warmup_steps = 5 is longer than training.steps = 2"
    assert str(torchmars.make_plan(config, 2, 0)).count(line) == 1
    torchmars.run_training(config)
    assert capsys.readouterr().out.count(line) == 1
