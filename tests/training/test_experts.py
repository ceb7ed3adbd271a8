"""Counts of a mixture's experts in exact mode, in checkpoints, and where a step is left out."""

import math

import pytest

from tests.checkpoint.test_expert_layouts import resume_each
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.small_runs import MODELS, record_counts, run_tables
from tests.support.tiny import train_here, write_text

MODEL, EXACT = "Qwen3-MoE", "mars-adamw, exact"
CHOICES = MODELS[MODEL]["n_expert_used"] * 16 * 32  # of a step and layer


@FULL
def test_a_run_in_exact_mode_goes_on_bit_for_bit(tmp_path):
    """Its next step needs the counts of two steps."""
    resume_each(tmp_path, MODEL, EXACT, [("FSDP 2", "FSDP 2")], steps=6)


def leave_out(trainer, reason):
    """Let a trainer leave out its fourth step, for a "spike" or a gradient that is "nan"."""
    steps = []

    def is_fourth(*_):
        steps.append(trainer.state.step)
        return len(steps) == 4

    def break_gradient(*_):
        if is_fourth():
            next(iter(trainer.optimizer.state)).grad.fill_(math.nan)

    if reason == "nan":
        trainer.optimizer.register_step_pre_hook(break_gradient)
    else:
        trainer.loss_guard.active, trainer.check_loss = True, is_fourth


def counts_without_fourth(tables, reason):
    """The state of the counts at the begin and after each step."""
    counts = []

    def change(trainer):
        leave_out(trainer, reason)
        record_counts(trainer, into=counts)

    train_here(tables, change=change)
    return counts


@pytest.mark.parametrize("reason", ["spike", "nan"])
def test_a_step_that_is_left_out_leaves_the_counts_as_they_were(tmp_path, reason):
    write_text(tmp_path)
    tables = run_tables(tmp_path, MODEL, EXACT, "1 rank")
    tables["training"]["steps"], tables["checkpoint"] = 6, {"interval": 2}
    [counts] = run_ranks(counts_without_fourth, 1, tables, reason)

    def latest(step):
        return {name: each for name, each in counts[step].items() if name.endswith(".counts")}

    for step in range(1, len(counts)):
        assert all(sum(each) == CHOICES for each in latest(step).values())
    assert latest(4) == latest(3) != latest(5) and len(counts) == 1 + 6
