"""A checkpoint of a mixture of experts goes on on any other layout, and knows who was chosen."""

import pytest

from tests.support.full import FULL
from tests.support.layouts import by_ranks
from tests.support.ranks import run_ranks
from tests.support.small_runs import LOSSES, merged, run_tables, train_counted
from tests.support.tiny import copy_run, metrics, same, write_text

SIX = ["1 rank", "EP 2", "EP 4", "FSDP 2 x TP 2, EP 2", "HSDP 2x2, EP 2", "PP 2 x FSDP 2, EP 2"]
# Of losses, also where a near tie of a router falls otherwise.
BOUNDS = {"mars-adamw": 2e-5, "mars-m": 2e-4}


def tables_of(folder, model, rule, layout, saved=None, steps=20):
    """The tables of a run; `saved` is the layout of the checkpoint that it resumes from."""
    tables = run_tables(folder, model, rule, layout)
    tables["checkpoint"] |= {"interval": steps // 2, "keep_last": 0}
    tables["training"]["steps"] = steps
    if saved is not None:
        tables["run"]["name"] += f"-from-{saved}".replace(" ", "-").replace(",", "")
    return tables


def resume_each(folder, model, rule, pairs, steps):
    """Train on each layout, resume from the middle for each of `pairs`, and compare."""
    write_text(folder)
    counts = {}
    for ranks, layouts in by_ranks(list(dict.fromkeys(saved for saved, _ in pairs))).items():
        runs = [tables_of(folder, model, rule, layout, steps=steps) for layout in layouts]
        found = zip(*run_ranks(train_counted, ranks, *runs))
        counts |= {layout: merged(each) for layout, each in zip(layouts, found)}
    for ranks, layouts in by_ranks(list(dict.fromkeys(there for _, there in pairs))).items():
        chosen = [(saved, there) for saved, there in pairs if there in layouts]
        runs = [tables_of(folder, model, rule, there, saved, steps) for saved, there in chosen]
        for (saved, _), tables in zip(chosen, runs):
            copy_run(tables_of(folder, model, rule, saved, steps=steps), tables, steps // 2)
        found = zip(*run_ranks(train_counted, ranks, *runs))
        for (saved, there), tables, ours in zip(chosen, runs, found):
            assert merged(ours)[0] == counts[saved][steps // 2], (saved, there)
            whole = metrics(tables_of(folder, model, rule, saved, steps=steps))
            same(whole, metrics(tables), tolerance=0 if saved == there else BOUNDS[rule])


QUICK = [("EP 2", "TP 2, EP 2"), ("EP 2", "EP 2")]
MORE = [("EP 4", "FSDP 2 x TP 2, EP 2"), ("EP 4", "PP 2 x FSDP 2, EP 2"), ("EP 4", "1 rank")]


@pytest.mark.parametrize("pairs", [QUICK, pytest.param(MORE, marks=FULL)], ids=["quick", "more"])
def test_experts_go_on_on_other_ranks(tmp_path, pairs):
    resume_each(tmp_path, "Qwen3-MoE", "mars-m", pairs, steps=6)


@FULL
def test_latent_attention_goes_on_on_other_ranks(tmp_path):
    pairs = [("EP 2", "TP 2, EP 2"), ("TP 2, EP 2", "CP 2, EP 2"), ("TP 2, EP 2", "TP 2, EP 2")]
    resume_each(tmp_path, "DeepSeek", "mars-m", pairs, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BOUNDS)
@pytest.mark.parametrize("model", LOSSES)
def test_the_layout_matrix_of_experts(tmp_path, model, rule):
    resume_each(tmp_path, model, rule, [(a, b) for a in SIX for b in SIX], steps=20)
