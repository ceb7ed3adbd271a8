"""Runs of mixtures of experts: their counts on every layout, in checkpoints and skipped steps."""

import math

import pytest
import torch

from tests.checkpoint.test_resume import copy_run, same
from tests.support.full import FULL
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train_here, write_text
from torchmars.parallel.balance import Balance

MODEL = {
    "name": "llama",
    "n_layer": 4,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "n_inner": 48,
    "n_expert": 8,
    "n_expert_used": 2,
    "n_expert_inner": 32,
}
STEPS, CHOICES = 6, 2 * 16 * 32  # of a step: 2 for each token


def tables_of(folder, name, layout="1 rank", **overrides):
    """The tables of a run whose routers have both losses, and that validates on the way."""
    given = {"steps": STEPS, "dtype": "float32", "balance_loss": 1e-2, "router_z_loss": 1e-3}
    overrides["training"] = given | overrides.get("training", {})
    overrides["optimizer"] = {"lr": 2e-3, **overrides.get("optimizer", {})}
    return tiny_tables(
        folder,
        run={"name": name},
        model=MODEL,
        parallelism=LAYOUTS[layout][1],
        validation={"interval": 2, "windows": 4},
        **overrides,
    )


def counts_of(*runs, change=lambda trainer: None):
    """Train runs here; return this rank's counts of each, by step and block."""
    found = []

    def record(trainer):
        change(trainer)
        balance, steps = trainer.model.balance, []
        found.append(steps)
        finish = balance.finish

        def finish_and_record(applied):
            finish(applied)
            steps.append(dict(zip(balance.layers, balance.counts.clone())))

        balance.finish = finish_and_record

    train_here(*runs, change=record)
    return found


def merged(ranks):
    """The counts of all blocks of a run, [steps, layers, experts], from those of its ranks."""
    steps = [{name: each for part in parts for name, each in part.items()} for parts in zip(*ranks)]
    for parts, whole in zip(zip(*ranks), steps, strict=True):
        for part in parts:
            assert all(torch.equal(each, whole[name]) for name, each in part.items())
    return torch.stack([torch.stack([step[name] for name in sorted(step)]) for step in steps])


CASES = {
    "FSDP 2": {"activation_checkpoint": {"mode": "full"}, "training": {"microbatch_size": 4}},
    "PP 2": {"training": {"microbatch_size": 4}},
}
MORE = {
    "FSDP 2": {"training": {"microbatch_size": 2}},
    "TP 2": {"activation_checkpoint": {"mode": "selective"}},
    "CP 2": {"activation_checkpoint": {"mode": "full"}},
    "PP 2 DualPipeV": {},
}


@pytest.mark.parametrize(
    "mode,cases",
    [
        ("approx", CASES),
        pytest.param("exact", CASES, marks=FULL),
        pytest.param("approx", MORE, marks=FULL),
        pytest.param("exact", MORE, marks=FULL),
    ],
)
def test_losses_and_counts_are_those_of_one_rank(tmp_path, mode, cases):
    write_text(tmp_path)
    optimizer = {"mode": mode}
    one = tables_of(tmp_path, "one", optimizer=optimizer)
    expected = merged([run_ranks(counts_of, 1, one)[0][0]])
    assert len(expected) == STEPS and (expected.sum(-1) == CHOICES).all()
    runs = [
        tables_of(tmp_path, layout, layout, optimizer=optimizer, **settings)
        for layout, settings in cases.items()
    ]
    for tables, ranks in zip(runs, zip(*run_ranks(counts_of, 2, *runs)), strict=True):
        assert torch.equal(merged(ranks), expected), tables
        same(metrics(one), metrics(tables), tolerance=1e-6)
        for name in ("busiest", "entropy", "without_tokens"):
            name = f"train/experts/{name}"
            same(metrics(one, name), metrics(tables, name), tolerance=1e-12)


@pytest.mark.parametrize(
    "layouts", [["FSDP 2", "TP 2"], pytest.param(["TP 2", "PP 2", "CP 2"], marks=FULL)]
)
def test_counts_go_on_bit_for_bit_and_on_other_layouts(tmp_path, layouts):
    """In exact mode the next batch needs the counts of two steps."""
    write_text(tmp_path)
    settings = {"checkpoint": {"interval": 3, "keep_last": 0}, "optimizer": {"mode": "exact"}}
    whole = tables_of(tmp_path, "whole", layouts[0], **settings)
    straight = merged([ranks[0] for ranks in run_ranks(counts_of, 2, whole)])
    runs = [tables_of(tmp_path, f"on {each}", each, **settings) for each in layouts]
    for tables in runs:
        copy_run(whole, tables, keep_until=3)
    resumed = list(zip(*run_ranks(counts_of, 2, *runs)))
    for number, (tables, ranks) in enumerate(zip(runs, resumed, strict=True)):
        same(metrics(whole), metrics(tables), tolerance=1e-6 if number else 0)
        assert torch.equal(merged(ranks), straight[3:])


def first_counts(trainer, found):
    """Keep what the routers' losses of the first pass are made of."""
    found.append(trainer.model.balance.counts.clone())


def resumed_without(tables):
    """The counts that a run begins with that goes on from a checkpoint without any."""
    found, state = [], Balance.state
    Balance.state = lambda self: {}
    train_here(tables)
    Balance.state = state
    tables["training"]["steps"] += 1
    train_here(tables, change=lambda trainer: first_counts(trainer, found))
    tables["training"]["steps"] += 1
    train_here(tables, change=lambda trainer: first_counts(trainer, found))
    return found


def test_a_checkpoint_without_counts_goes_on_as_before_the_first_step(tmp_path):
    write_text(tmp_path)
    tables = tables_of(tmp_path, "old", training={"steps": 2})
    [(without, with_counts)] = run_ranks(resumed_without, 1, tables)
    assert not without.any() and (with_counts.sum(-1) == CHOICES).all()


def counts_of_guarded(tables, action):
    """Counts by step, and those after a rollback, of a run whose fourth step is left out.

    `action` is that of the guard, or "nan" for a gradient that is not finite.
    """
    after = []

    def change(trainer):
        roll_back, seen = trainer.roll_back, []

        def is_outlier(_):
            seen.append(trainer.state.step)
            return len(seen) == 4

        def break_gradient(*_):
            seen.append(trainer.state.step)
            if len(seen) == 4:
                next(iter(trainer.optimizer.state)).grad.fill_(math.nan)

        def roll_back_and_record():
            roll_back()
            after.append(
                {name: each.clone() for name, each in trainer.model.balance.state().items()}
            )

        trainer.roll_back = roll_back_and_record
        if action == "nan":
            trainer.optimizer.register_step_pre_hook(break_gradient)
        else:
            trainer.loss_guard.action = action
            trainer.check_loss = is_outlier

    return merged([counts_of(tables, change=change)[0]]), after


@pytest.mark.parametrize("action", ["skip", "rollback", "nan"])
def test_a_step_that_is_left_out_leaves_the_counts_as_they_were(tmp_path, action):
    write_text(tmp_path)
    exact = {"optimizer": {"mode": "exact"}, "checkpoint": {"interval": 2}}
    [(counts, after)] = run_ranks(
        counts_of_guarded, 1, tables_of(tmp_path, action, **exact), action
    )
    assert (counts.sum(-1) == CHOICES).all()
    if action == "rollback":  # to step 2; steps 1 to 3 were made, then 3 to 6
        assert len(counts) == STEPS + 1
        [state] = after
        for layer in range(MODEL["n_layer"]):
            assert torch.equal(state[f"balance.{layer}.counts"], counts[1, layer])
            assert torch.equal(state[f"balance.{layer}.counts_before"], counts[0, layer])
    else:
        assert len(counts) == STEPS and not after
        assert torch.equal(counts[3], counts[2]) and not torch.equal(counts[4], counts[3])
