"""The loss does not know the layout: the same run, by the trainer itself, on all of them."""

from itertools import product

import pytest

from tests.support.full import FULL, full_but
from tests.support.layout_losses import MODELS, RULES, losses, losses_apart, run_tables
from tests.support.layouts import LAYOUTS
from tests.support.tiny import metrics, write_text

OTHERS = [layout for layout in LAYOUTS if layout != "1 rank"]
# Rounding decides between two bfloat16 inputs of an orthogonalisation, and between the signs of an
# entry near 0.
ROUGH = ("mars-lion", "lion", "mars-shampoo", "muon", "mars-m, bfloat16")
SOME = ("mars-adamw", "mars-m", "mars-adamw, exact")


def check(folder, cases, layouts, steps=20, **training):
    """Compare runs on layouts with those on one rank; `training` is of the former alone."""
    write_text(folder)
    apart = losses_apart(folder, cases, layouts, steps, **training)
    assert len(apart) == len(cases) * len(layouts)
    for (_, rule, _), each in apart.items():
        assert each < (1e-3 if rule in ROUGH else 1e-5), apart


def test_losses_are_those_of_one_rank(tmp_path):
    layouts = ["HSDP 2x2", "TP 2", "CP 2", "PP 2"]
    check(tmp_path, [("GPT-2", "mars-m")], layouts, steps=10)
    found = metrics(run_tables(tmp_path, "GPT-2", "mars-m", "1 rank"))
    assert list(found) == list(range(1, 11)) and found[10] < 0.8 * found[1]


@FULL
def test_losses_of_layouts_of_two_kinds_are_those_of_one_rank(tmp_path):
    cases = [("Llama", "mars-m"), ("DeepSeek", "mars-m"), ("GPT-2", "mars-adamw, exact")]
    cases.append(("Llama", "mars-m, per head"))
    check(tmp_path, cases, ["TP 2 x CP 2", "PP 2 x FSDP 2"], steps=10)


@FULL
@pytest.mark.parametrize(
    "rules,layouts,microbatch_size",
    [
        (RULES, ["1 rank", "FSDP 2"], 2),
        (("mars-lion", "mars-m, bfloat16", "mars-adamw, exact"), ["HSDP 2x2"], 2),
        (("mars-adamw", "adamw"), ["FSDP 4", "HSDP 2x1"], 1),
    ],
    ids=["every rule", "shards with replicas", "replicas"],
)
def test_losses_of_rules_are_those_of_one_rank(tmp_path, rules, layouts, microbatch_size):
    """Also with smaller microbatches."""
    cases = [("GPT-2", rule) for rule in rules]
    check(tmp_path, cases, layouts, steps=10, microbatch_size=microbatch_size)
    last = [losses(run_tables(tmp_path, *case, "1 rank"))["train/loss", 10] for case in cases]
    assert len({*last}) == len(cases)  # each is another rule


@FULL
@pytest.mark.parametrize("model", ["DeepSeek", "DeepSeek without latents of queries"])
def test_losses_of_latent_attention_are_those_of_one_rank(model, tmp_path):
    layouts = ["FSDP 2", "TP 2", "CP 2", "CP 2 Ulysses", "PP 2", "TP 2 x CP 2 Ulysses"]
    check(tmp_path, [(model, "mars-m")], layouts, steps=10)


def test_losses_of_a_model_with_a_base_are_those_of_one_rank(tmp_path):
    """Whose multipliers and factors are not 1: it is 3 times as wide and 5 times as deep."""
    check(tmp_path, [("Llama of a base", "mars-m")], ["PP 2"], steps=3)


def test_losses_of_windows_are_those_of_one_rank(tmp_path):
    """In blocks of two kinds, of which every third does not rotate, with YaRN."""
    check(tmp_path, [("windows", "mars-m")], ["CP 2"], steps=3)


def test_losses_of_norms_over_the_heads_of_all_ranks_are_those_of_one_rank(tmp_path):
    check(tmp_path, [("OLMo 3", "mars-m")], ["TP 2"], steps=3)


@pytest.mark.parametrize("model", ["Llama of a base", "windows", "OLMo 3"])
@pytest.mark.parametrize("rule", full_but([], ["mars-m", "mars-adamw"], ["mars-adamw"]))
def test_so_they_are_on_six_layouts(rule, model, tmp_path):
    layouts = ["HSDP 2x2", "TP 2", "PP 2 x FSDP 2", "CP 2", "CP 2 Ulysses", "TP 2 x CP 2"]
    check(tmp_path, [(model, rule)], layouts, steps=10)


ALL = [*product(MODELS, SOME), *(("GPT-2", rule) for rule in RULES if rule not in SOME)]


@pytest.mark.slow
@pytest.mark.parametrize("model,rule", ALL)
def test_losses_on_every_layout(model, rule, tmp_path):
    check(tmp_path, [(model, rule)], OTHERS)
