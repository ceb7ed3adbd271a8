"""A mixture of experts has one loss on every layout, and each token the same experts."""

import pytest

from tests.support.expert_losses import LOSSES, runs_apart
from tests.support.full import FULL
from tests.support.layouts import EXPERT_LAYOUTS
from tests.support.tiny import write_text

# Of losses, until a near tie of a router falls otherwise, and after.
BEFORE, AFTER = 1e-6, {"mars-adamw": 2e-5, "mars-m": 2e-4}
# AdamW divides gradients that are hardly more than rounding by their size. On one rank with other
# microbatches norms are 2e-6 and 3e-6 apart.
NORMS = 1e-5
MOVED = 1 / 50_000  # of all choices
THREE = [("FSDP 2", ""), ("EP 2", "full"), ("TP 2, EP 2", "")]
MORE = [("CP 2, EP 2", "microbatches of 4"), ("EP 4", "selective"), ("PP 2 x FSDP 2, EP 2", "")]
ALL = [
    *((layout, "") for layout in ("FSDP 2", "FSDP 4", "TP 2", *EXPERT_LAYOUTS)),
    *((layout, mode) for layout in ("FSDP 2", "FSDP 4, EP 2") for mode in ("full", "selective")),
    *(
        (layout, f"microbatches of {size}")
        for layout, ranks in (("1 rank", 1), ("EP 2", 2), ("FSDP 4, EP 2", 4))
        for size in (8 // ranks, 4 // ranks)
        if size <= 4
    ),
]


def check(folder, model, rule, cases, norms=NORMS, layers=4, steps=20):
    write_text(folder)
    found = runs_apart(folder, model, rule, cases, layers, steps)
    for case, apart in found.items():
        print(f"{model} {rule} {' '.join(case)}: {apart}")
    assert max(apart.before for apart in found.values()) < BEFORE, found
    assert max(apart.norms for apart in found.values()) < norms, found
    assert max(apart.after for apart in found.values()) < AFTER[rule.partition(",")[0]], found
    choices = sum(apart.choices for apart in found.values())
    assert sum(apart.moved for apart in found.values()) <= choices * MOVED, found


@pytest.mark.parametrize("cases", [THREE, pytest.param(MORE, marks=FULL)], ids=["", "more"])
def test_losses_and_choices_are_those_of_one_rank(tmp_path, cases):
    check(tmp_path, "Qwen3-MoE", "mars-m", cases, layers=2, steps=10)


@FULL
def test_so_they_are_with_groups_of_experts_and_latent_attention(tmp_path):
    cases = [*THREE, *MORE, ("CP 2 Ulysses", ""), ("FSDP 2 x TP 2, EP 4", "")]
    check(tmp_path, "DeepSeek", "mars-m", cases, layers=3, steps=10)


@FULL
def test_both_gradients_of_a_batch_have_one_loss(tmp_path):
    cases = [("FSDP 2", "full"), ("CP 2, EP 2", "selective"), ("PP 2", "microbatches of 4")]
    # On one rank with other microbatches norms are up to 2e-5 apart here, each for one step.
    check(tmp_path, "Qwen3-MoE", "mars-adamw, exact", cases, norms=5e-5, layers=2, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("rule", AFTER)
@pytest.mark.parametrize("model", LOSSES)
def test_losses_and_choices_on_every_layout(model, rule, tmp_path):
    check(tmp_path, model, rule, ALL)
