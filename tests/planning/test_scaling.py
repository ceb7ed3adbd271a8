"""What `plan` says of a base: rates as the optimizer has them, and what leaves its family."""

import re

import pytest

from torchmars.config.load import config_of
from torchmars.models import build_run_model
from torchmars.planning.scaling import beyond_family, transferred
from torchmars.training.optimizer import build_optimizer
from torchmars.training.summary import base_line

BASE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "n_inner": 768}
LARGE = {"name": "llama", "n_layer": 10, "n_head": 12, "n_kv_head": 6, "n_embd": 768}


def planned(transfer, rule="muon", **model):
    tables = {"model": LARGE | {"n_inner": 2304, "tied": False} | model, "transfer": transfer}
    config = config_of([("in a test", tables | {"optimizer": {"name": rule, "lr": 0.01}})])
    whole = build_run_model(config, 257)
    warnings = list(beyond_family(config, whole))
    return transferred(config, whole, build_optimizer(config, whole)), warnings, config, whole


def test_each_role_is_told_with_what_it_gets():
    lines, warnings, config, whole = planned(BASE | {"depth": "1/L"})
    assert warnings == []  # all grows together
    rows = {tuple(re.split(r"\s\s+", line)) for line in lines}
    # lr 0.01 / 3^(1/2), decay 0.1 * 3^(1/2); proj begins at 0.02 / (2 * 2)^(1/2) / 3^(1/2).
    assert ("matrix", "20", "0.01155", "0.005774", "0.1732", "1e-08") in rows
    # A head of q, k or v is 64 x 768, and 64 x 256 in the base: lr 0.01 / 3, decay 0.1 * 3.
    assert ("matrix", "30", "0.01155", "0.003333", "0.3", "1e-08") in rows
    assert ("matrix", "20", "0.005774", "0.005774", "0.1732", "1e-08") in rows
    assert ("head", "1", "0.02", "0.01", "0.1", "3.333e-09") in rows
    assert ("vector", "20", "ones", "0.01", "0.1", "6.667e-10") in rows
    advice = " ".join(lines[-2:])
    assert "root of the batch" in advice and "tokens^-0.32" in advice and "arXiv" in advice
    text = base_line(config, whole)
    assert text.startswith("2 layers, 4 heads (2 of keys and values), width 256 (MLP 768)")
    assert text.endswith("multipliers logits 0.333333, residual 0.2, attention 1")
    assert planned({})[:2] == ([], [])


@pytest.mark.parametrize(
    "base,model,message",
    [
        ({"n_embd": 1536, "n_head": 24}, {}, "its base is larger.*: name a smaller base"),
        ({"n_layer": 20}, {}, "its base is larger"),
        ({}, {"n_kv_head": 2}, "n_kv_head = 2 where the base's 2 would be 6 at this width"),
        ({"n_inner": 1024}, {}, "n_inner = 2304 where the base's 1024 would be 3072"),
        ({"n_head": 8}, {}, "heads are 64 wide, the base's 32"),
        ({"n_embd": 64, "n_head": 1, "n_kv_head": 1}, {}, "its base is 64 wide"),
        (
            {"n_expert": 8},
            {"n_expert": 16},
            "n_expert = 16 where the base's 8 would be 8 at this width",
        ),
    ],
)
def test_what_leaves_the_family_is_told(base, model, message):
    _, warnings, _, _ = planned(BASE | base, **model)
    assert any(re.search(message, each) for each in warnings), warnings
