"""On every layout each weight begins and has the gradient as in one plain model."""

import pytest

from tests.support.full import FULL
from tests.support.gradients import NAMES, check_layouts
from tests.support.layouts import LAYOUTS, LAYOUTS_WITH_EXPERTS

# Each technique with a model in which it has most to get wrong: GPT-2 has a tied table and fused
# projections, Llama an own head, grouped queries and norms of heads.
QUICK = [
    ("deepseek", "TP 2 x CP 2 Ulysses"),
    ("llama", "FSDP 2 x TP 2"),
    ("moe", "FSDP 4, EP 2"),
    ("gpt2", "PP 2"),
    ("own mixture", "TP 2, EP 2"),
]
MORE = [
    *(
        (name, layout)
        for name in ("deepseek", "deepseek without latents of queries")
        for layout in ("FSDP 2 x TP 2", "TP 2 x CP 2", "PP 2 Interleaved1F1B")
    ),
    ("deepseek", "HSDP 2x2"),
    ("deepseek", "FSDP 4, EP 2"),
    ("deepseek", "TP 2, EP 2"),
    ("deepseek", "CP 2, EP 2"),
    ("llama", "PP 2 Interleaved1F1B"),
    ("glm", "TP 2, EP 2"),
    ("own mixture", "TP 2"),
    ("own mixture", "FSDP 4, EP 2"),
    ("gpt2", "TP 2 x CP 2 Ulysses"),
    ("llama", "HSDP 2x2"),
    ("llama", "CP 2 x FSDP 2"),
    ("gpt2", "PP 2 Interleaved1F1B"),
    ("gpt2", "PP 2 x TP 2"),
    ("moe", "PP 2 Interleaved1F1B"),
    ("moe", "HSDP 2x2"),
    ("moe", "TP 2 x CP 2"),
    ("moe", "TP 2"),
    ("moe", "HSDP 2x2, EP 2"),
    ("moe", "FSDP 2 x TP 2, EP 4"),
    ("moe", "PP 2 x FSDP 2, EP 2"),
    ("glm", "FSDP 2 x TP 2"),
    ("glm", "PP 2 Interleaved1F1B x FSDP 2, EP 2"),
]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=FULL)], ids=["", "more"])
def test_gradients_are_those_of_one_plain_model(cases):
    check_layouts(cases)


# Each way in which a part of a model, or of a sequence, gets to know of the documents.
APART = [
    ("gpt2", "FSDP 2"),
    ("llama", "CP 2"),
    ("gpt2", "TP 2"),
    ("gpt2", "CP 2 Ulysses"),
    ("llama", "PP 2"),
    ("deepseek", "CP 2"),
    ("deepseek", "TP 2 x CP 2 Ulysses"),
]


@pytest.mark.parametrize(
    "cases", [APART[:2], pytest.param(APART[2:], marks=FULL)], ids=["", "more"]
)
def test_gradients_are_those_of_each_document_alone(cases):
    check_layouts(cases, apart=True)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_every_layout(name, apart):
    layouts = LAYOUTS_WITH_EXPERTS if name in ("moe", "glm", "deepseek") else LAYOUTS
    check_layouts([(name, layout) for layout in layouts], apart)
