"""Counts of a mixture's experts in exact mode, in checkpoints, and where a step is left out."""

import math

import pytest

from tests.checkpoint.test_expert_layouts import resume_each
from tests.support.expert_losses import MODELS, ONE, record_counts, run_tables
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import train_here, write_text
from torchmars.parallel.balance import Balance

MODEL, EXACT = "Qwen3-MoE", "mars-adamw, exact"
CHOICES = MODELS[MODEL]["n_expert_used"] * 16 * 32  # of a step and layer


@FULL
def test_a_run_in_exact_mode_goes_on_bit_for_bit(tmp_path):
    """Its next step needs the counts of two steps."""
    resume_each(tmp_path, MODEL, EXACT, [("FSDP 2", "FSDP 2")], steps=6)


def resumed_without(tables):
    """The counts that a run begins with, from a checkpoint without any and from one with some."""
    found, state = [], Balance.state
    Balance.state = lambda self: {}
    train_here(tables)
    Balance.state = state
    for _ in range(2):
        tables["training"]["steps"] += 1
        train_here(
            tables, change=lambda trainer: found.append(trainer.model.balance.counts.clone())
        )
    return found


def test_a_checkpoint_without_counts_goes_on_as_before_the_first_step(tmp_path):
    write_text(tmp_path)
    tables = run_tables(tmp_path, MODEL, "mars-adamw", ONE)
    tables["training"]["steps"] = 2
    [(without, counted)] = run_ranks(resumed_without, 1, tables)
    assert not without.any() and (counted.sum(-1) == CHOICES).all()


def leave_out(trainer, action, rolled_back):
    """Let a trainer leave out its fourth step; after a rollback add its state to `rolled_back`.

    `action` is that of the guard, or "nan" for a gradient that is not finite.
    """
    steps, roll_back = [], trainer.roll_back

    def is_fourth(*_):
        steps.append(trainer.state.step)
        return len(steps) == 4

    def break_gradient(*_):
        if is_fourth():
            next(iter(trainer.optimizer.state)).grad.fill_(math.nan)

    def roll_back_and_record():
        roll_back()
        rolled_back.append(
            {name: each.tolist() for name, each in trainer.model.balance.state().items()}
        )

    trainer.roll_back = roll_back_and_record
    if action == "nan":
        trainer.optimizer.register_step_pre_hook(break_gradient)
    else:
        trainer.loss_guard.action, trainer.check_loss = action, is_fourth


def counts_without_fourth(tables, action):
    """The state of the counts at the begin and after each step, and after a rollback."""
    counts, rolled_back = [], []

    def change(trainer):
        leave_out(trainer, action, rolled_back)
        record_counts(trainer, into=counts)

    train_here(tables, change=change)
    return counts, rolled_back


@pytest.mark.parametrize("action", ["skip", "rollback", "nan"])
def test_a_step_that_is_left_out_leaves_the_counts_as_they_were(tmp_path, action):
    write_text(tmp_path)
    tables = run_tables(tmp_path, MODEL, EXACT, ONE)
    tables["training"]["steps"], tables["checkpoint"] = 6, {"interval": 2}
    [(counts, rolled_back)] = run_ranks(counts_without_fourth, 1, tables, action)

    def latest(step):
        return {name: each for name, each in counts[step].items() if name.endswith(".counts")}

    for step in range(1, len(counts)):
        assert all(sum(each) == CHOICES for each in latest(step).values())
    if action == "rollback":
        assert rolled_back == [counts[2]] and latest(1) != latest(2) != latest(3)
        assert len(counts) == 1 + 4 + 4  # steps 3 to 6 are made again
    else:
        assert latest(4) == latest(3) != latest(5) and len(counts) == 1 + 6
