"""A checkpoint of any layout goes on on any other: names on disk do not know layouts."""

import pytest
import torch

from tests.support.full import FULL
from tests.support.layouts import LAYOUTS, by_ranks
from tests.support.small_runs import MODELS, RULES
from tests.support.tiny import (
    copy_run,
    metrics,
    run_folder_of,
    same,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.reader import read_index, shapes_in
from torchmars.exchange.saved_model import load_model

EIGHT = [
    "1 rank",
    "HSDP 2x2",
    "TP 2",
    "FSDP 2 x TP 2",
    "CP 2 x FSDP 2",
    "TP 2 x CP 2 Ulysses",
    "PP 2 Interleaved1F1B",
    "PP 2 x FSDP 2",
]


def tables_of(folder, run, layout, steps, model="GPT-2", rule="mars-m", **overrides):
    return tiny_tables(
        folder,
        run={"name": run.replace(" ", "-")},
        model=MODELS[model] | overrides,
        optimizer=RULES[rule],
        parallelism=LAYOUTS[layout][1],
        training={"steps": steps, "dtype": "float32"},
        checkpoint={"interval": steps // 2, "keep_last": 0},
    )


def resume_each(folder, pairs, steps, **settings):
    """Train on each layout, resume from the middle for each of `pairs`, and compare the losses."""
    for ranks, layouts in by_ranks(list(dict.fromkeys(saved for saved, _ in pairs))).items():
        train(ranks, *(tables_of(folder, name, name, steps, **settings) for name in layouts))
    for ranks, layouts in by_ranks(list(dict.fromkeys(there for _, there in pairs))).items():
        chosen = [(saved, there) for saved, there in pairs if there in layouts]
        runs = [
            tables_of(folder, f"{saved} to {there}", there, steps, **settings)
            for saved, there in chosen
        ]
        for (saved, _), tables in zip(chosen, runs):
            whole = tables_of(folder, saved, saved, steps, **settings)
            copy_run(whole, tables, keep_until=steps // 2)
        train(ranks, *runs)
        for (saved, there), tables in zip(chosen, runs):
            same(
                metrics(tables_of(folder, saved, saved, steps, **settings)),
                metrics(tables),
                tolerance=0 if saved == there else 1e-5,
            )


PAIRS = [
    ("PP 2 Interleaved1F1B", "TP 2"),
    ("TP 2", "PP 2 Interleaved1F1B"),
    ("TP 2", "CP 2"),
    ("CP 2", "CP 2"),
    ("PP 2 Interleaved1F1B", "PP 2 Interleaved1F1B"),
]


@pytest.mark.parametrize("pairs", [PAIRS[:1], pytest.param(PAIRS, marks=FULL)], ids=["one", "all"])
def test_pipelines_tensors_and_contexts_go_on_on_each_other(tmp_path, pairs):
    write_text(tmp_path)
    resume_each(tmp_path, pairs, steps=6)
    pipeline, one = (
        tables_of(tmp_path, name, name, 6) for name in ("PP 2 Interleaved1F1B", "1 rank")
    )
    train(1, one)
    folders = [checkpoints(run_folder_of(tables) / "checkpoints")[-1] for tables in (pipeline, one)]
    ours, expected = (shapes_in(read_index(each, manifests.read(each))) for each in folders)
    assert {name: ours[name] for name in expected} == expected
    assert ours.keys() - expected.keys() == {"rng.cpu.1"}
    assert manifests.read(folders[0]).optimizer == manifests.read(folders[1]).optimizer
    model, reference = (load_model(folder)[0] for folder in folders)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "GPT-2", "rule": "mars-m"},
        {"model": "Llama", "rule": "mars-adamw"},
        {"model": "GPT-2", "rule": "mars-m, options"},
    ],
)
def test_the_layout_matrix(tmp_path, settings):
    write_text(tmp_path)
    resume_each(tmp_path, [(a, b) for a in EIGHT for b in EIGHT], steps=20, **settings)


@pytest.mark.slow
def test_dropout_goes_on_bit_for_bit(tmp_path):
    write_text(tmp_path)
    resume_each(tmp_path, [(layout, layout) for layout in EIGHT], steps=8, dropout=0.1)


THREE = ["FSDP 2 x TP 2", "TP 2 x CP 2 Ulysses", "PP 2 x FSDP 2"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["windows", "OLMo 3", "DeepSeek, dense"])
def test_families_go_on_on_each_other(tmp_path, model):
    write_text(tmp_path)
    pairs = [(a, b) for a in THREE for b in THREE]
    resume_each(tmp_path, pairs, steps=20, model=model, rule="mars-m")
