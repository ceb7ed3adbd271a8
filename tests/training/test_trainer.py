"""What a run reports, and how it ends where it cannot go on. The layouts are in parallel/."""

import itertools
import shutil
from functools import partial

import numpy as np

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    AtReport,
    listen,
    listen_on,
    metrics,
    run_folder_of,
    steps_kept,
    tiny_tables,
    train,
    train_here,
    write_text,
)
from torchmars.core.errors import UserError


def fails(tables, change=lambda trainer: None):
    try:
        train_here(tables, change=change)
    except UserError as error:
        return str(error)
    return "no error"


def test_ranks_refuse_a_layout_that_cannot_be(tmp_path):
    """Also where no launcher has asked before."""
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, parallelism={"tp": 2}, training={"seq_len": 31})
    for error in run_ranks(fails, 2, tables):
        assert "training.seq_len = 31 must be a multiple of 2" in error


def broken_from_step_3(tables):
    """Every gradient from step 3 on is not finite."""
    steps = itertools.count(1)

    def break_gradient(optimizer, *_):
        if next(steps) >= 3:
            optimizer.param_groups[0]["params"][0].grad.to_local().fill_(float("nan"))

    return fails(tables, lambda trainer: trainer.optimizer.register_step_pre_hook(break_gradient))


def test_a_run_that_only_skips_stops(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, metrics={"log_interval": 4})
    errors = run_ranks(broken_from_step_3, 2, tables)
    assert errors[0] == errors[1] and "the last 10 steps up to 12 were skipped" in errors[0]
    assert metrics(tables, "train/skipped_steps") == {1: 0, 4: 2, 8: 6, 12: 10}


def without_its_folder(tables):
    """Train; the run's folder is deleted after step 3. What this rank is told."""

    def delete_after_3(trainer):
        if trainer.layout.first:
            delete = AtReport(3, lambda: shutil.rmtree(run_folder_of(tables)))
            trainer.metrics.trackers.append(delete)

    return fails(tables, delete_after_3)


def test_a_run_whose_folder_vanishes_ends_and_names_it(tmp_path):
    """It does not make the folder again, at the next save, as if nothing had been lost."""
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, checkpoint={"interval": 5})
    for error in run_ranks(without_its_folder, 2, tables):
        assert error.startswith(
            f"{run_folder_of(tables)}/lock is gone after step 3: the run "
            "folder was deleted, moved or unmounted"
        )
    assert not run_folder_of(tables).exists()


def test_telemetry_is_in_the_metrics(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 3}, optimizer={"name": "mars-m"})
    train(2, tables)
    for name in (
        "grad_norm",
        "data_ms",
        "forward_ms",
        "backward_ms",
        "reduce_ms",
        "optimizer_ms",
        "other_ms",
        "skipped_steps",
        "matrix/clipped",
        "matrix/correction",
        "matrix/cosine",
        "embedding/grad_norm",
        "vector/grad_norm",
    ):
        assert list(metrics(tables, f"train/{name}")) == [1, 2, 3]


def with_a_last_gradient_of_zero(trainer):
    """Let the first step of mars-m correct as all others do, with h = 0."""
    optimizer = trainer.optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["rule"] == "mars-m" else ():
            optimizer.state[parameter]["step"].fill_(1)


@FULL
def test_mars_m_of_gamma_1_minus_mu_without_clip_trains_as_muon(tmp_path):
    write_text(tmp_path)
    both = {"betas": [0.9, 0.99], "lr": 2e-3, "matrix_dtype": "float32"}
    mars = {"name": "mars-m", "gamma": 0.1, "clip": 0} | both
    runs = [
        tiny_tables(tmp_path, run={"name": name}, training={"steps": steps}, optimizer=optimizer)
        for name, steps, optimizer in [
            ("muon", 50, {"name": "muon"} | both),
            ("same", 50, mars),
            ("more", 10, mars | {"gamma": 0.2}),
        ]
    ]
    run_ranks(partial(train_here, change=with_a_last_gradient_of_zero), 1, *runs)
    muon, same, more = (np.array(list(metrics(each).values())) for each in runs)
    assert len(muon) == 50 and abs(same - muon).max() < 1e-5
    assert abs(more - muon[:10]).max() > 1e-3


def test_ranks_on_different_cpus_compute_in_one_dtype(tmp_path):
    """The first of two ranks multiplies bfloat16 fast, the other does not."""
    write_text(tmp_path)

    def tables(name, optimizer, **training):
        return tiny_tables(
            tmp_path,
            run={"name": name},
            optimizer=optimizer,
            training={"steps": 1} | training,
            schedule={"warmup_steps": 0},  # which would be warned of
        )

    auto, named, adamw = listen_on(
        [True, False],
        tables("auto", {"name": "muon"}),
        tables("named", {"name": "muon", "matrix_dtype": "bfloat16"}, dtype="bfloat16"),
        tables("adamw", {"name": "adamw"}, dtype="bfloat16"),
    )
    assert "float32 compute" in auto and "muon, approx, matrices in float32" in auto
    assert "warning" not in auto
    assert "bfloat16 compute" in named and "matrices in bfloat16" in named
    assert (
        named.count("warning") == 1
        and (
            "warning   training.dtype and optimizer.matrix_dtype = bfloat16 is slow here, since a "
            'device of this run has no instructions for it: training.dtype = "float32" and '
            'optimizer.matrix_dtype = "float32" is many times faster\n'
        )
        in named
    )
    assert "warning   training.dtype = bfloat16 is slow here" in adamw
    assert "matrices in" not in adamw and adamw.count("warning") == 1
    fast, named = listen_on(
        [True],
        tables("fast", {"name": "muon"}),
        tables("fast-named", {"name": "muon"}, dtype="bfloat16"),
    )
    assert "float32 compute" in fast and "matrices in bfloat16" in fast and "warning" not in fast
    assert "bfloat16 compute" in named and "warning" not in named


def test_a_short_look_at_a_long_run_is_a_piece_of_it(tmp_path):
    """On its schedule, validated and saved; the same command goes on where it is told to."""
    write_text(tmp_path)
    named = partial(tiny_tables, tmp_path, validation={"interval": 4}, schedule={"warmup_steps": 2})
    whole = named(run={"name": "whole"}, training={"steps": 6})
    short = named(run={"name": "short"}, training={"steps": 6, "stop_after": 3})
    train(1, whole)
    said = [listen(1, short) for _ in range(2)]
    assert "by training.stop_after after step 3, saved; raise it to go on" in said[0]
    assert steps_kept(short) == [3] and metrics(short, "validation/loss").keys() == {3}
    assert "stopped   at training.stop_after = 3: raise it, or leave it out, to go on" in said[1]
    del short["training"]["stop_after"]
    train(1, short)
    assert metrics(short) == metrics(whole)
