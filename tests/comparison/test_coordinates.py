"""The coordinate check: with [transfer] sizes stay as width and depth grow, without they do not."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch.nn.functional as F
from torch import nn

from tests.support.full import full_but
from torchmars.comparison.coordinates import coordinates, exponents, measured, sized
from torchmars.comparison.sizes import check_sizes
from torchmars.config import TransferConfig
from torchmars.config.load import validate
from torchmars.core.errors import UserError
from torchmars.optim import compiling, passes
from torchmars.optim.rules import RULES

LLAMA = {"name": "llama", "size": "nano", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2}
MODELS = {
    "gpt2": {"name": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64},
    "llama": LLAMA | {"n_inner": 192, "tied": False},
    "moe-nano": LLAMA | {"size": "moe-nano", "head_dim": 16, "n_inner": 128, "n_expert_inner": 64},
    "plain": {"name": "plain", "size": "tiny", "width": 64},
}
LR = {"adamw": 0.003, "mars-adamw": 0.003, "lion": 0.001, "mars-lion": 0.001}
# What gradients of the base's size at each width go with: table, head and norms see fewer of it.
GRADIENTS = {"embedding": -0.5, "head": -0.5, "vector": -0.5, "matrix": 0, "router": 0}


@pytest.fixture(autouse=True)
def plugin(own_family):
    return own_family


def config(model, rule, **tables):
    optimizer = {"name": rule, "lr": LR.get(rule, 0.01)}
    tables = {"model": MODELS[model], "optimizer": optimizer, "training": {"seq_len": 32}} | tables
    return validate([("in a test", tables)])


def check(model, rule, widths):
    found = exponents(coordinates(config(model, rule), widths))
    for place, exponent in found.items():
        role = place.removeprefix("gradient of ")
        if role != place:
            assert exponent == pytest.approx(GRADIENTS[role], abs=0.15), place
        else:
            assert abs(exponent) < 0.2, place


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_sizes_stay_as_width_grows(model, rule):
    check(model, rule, (64, 128, 256))


OTHER_RULES = ["mars-adamw", "lion", "mars-lion", "mars-m", "mars-shampoo"]


@pytest.mark.parametrize("rule", full_but(["mars-m"], OTHER_RULES))
def test_so_they_do_under_the_other_rules(rule):
    check("llama", rule, (64, 128, 256))


WIDE = [*product(MODELS, [*LR, "muon", "mars-m", "mars-shampoo"])]
WIDE_IN_FULL = [("gpt2", "mars-adamw"), ("llama", "mars-m")]


@pytest.mark.parametrize(
    "model,rule", full_but([], WIDE, [each for each in WIDE if each not in WIDE_IN_FULL])
)
def test_and_up_to_512_under_every_rule(model, rule):
    check(model, rule, (64, 128, 256, 512))


def test_nothing_is_compiled_for_a_few_steps(monkeypatch):
    """Of matrices of which a run's optimizer would compile its kernels."""
    monkeypatch.setattr(compiling, "MIN_MODEL_TO_COMPILE", 0)
    monkeypatch.setattr(passes, "_compiled", None)  # what is compiled is asked for there
    large = replace(config("gpt2", "muon"), transfer=TransferConfig())
    assert measured(sized(large, 512, 1), 1)["residual stream"] > 0


def test_without_it_they_grow():
    found = exponents(coordinates(config("llama", "adamw"), (64, 128, 256), without=True))
    assert found["residual stream"] > 0.7 and found["gradient of matrix"] > 0.7


@pytest.mark.parametrize("model", ["gpt2", "plain"])
def test_sizes_stay_as_depth_grows(model):
    section = {"n_layer": 2, "depth": "1/L"}
    found = exponents(coordinates(config(model, "adamw", transfer=section), (2, 4, 8), "depth"))
    assert all(abs(power) < 0.2 for name, power in found.items() if "gradient" not in name)
    found = exponents(coordinates(config(model, "adamw"), (2, 4, 8), "depth"))
    assert found["residual stream"] > 0.5  # 1/L is what holds it


def test_a_model_that_says_but_does_not_apply_a_multiplier_fails(plugin, monkeypatch):
    def forward(self, x, sight):
        x = x + self.attn(self.attn_norm(x), sight)
        return x + self.mlp(self.mlp_norm(x))

    monkeypatch.setattr(plugin.Block, "forward", forward)
    section = {"n_layer": 2, "depth": "1/L"}
    found = exponents(coordinates(config("plain", "adamw", transfer=section), (2, 4, 8), "depth"))
    assert found["residual stream"] > 0.5
    # And one whose head does not apply its own.
    monkeypatch.setattr(
        plugin.Plain,
        "head",
        lambda self, x, function=nn.functional.linear: function(x, self.output.weight),
    )
    found = exponents(coordinates(config("plain", "adamw"), (64, 128, 256)))
    assert found["change of logits"] > 0.7


class GatedMLP(nn.Module):
    """The MLP of a plugin that gates, as Gemma's does."""

    def __init__(self, args):
        super().__init__()
        inner = args.mlp_ratio * args.width
        self.gate, self.up = (nn.Linear(args.width, inner, bias=False) for _ in range(2))
        self.proj = nn.Linear(inner, args.width, bias=False)

    def forward(self, x):
        return self.proj(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    "power,wrong",
    [
        (1, set()),
        # As if matrices' rates stayed, and as if they fell twice as fast as they should.
        (0, {"mlp", "residual stream", "attention logits", "change of state"}),
        (2, {"attn", "mlp", "change of state", "change of logits"}),
    ],
)
def test_a_plugin_that_gates_passes_and_its_wrong_rates_are_found(
    plugin, monkeypatch, power, wrong
):
    """The hidden state tells of rates that fall too fast, which the logits alone may hide."""
    monkeypatch.setattr(plugin, "MLP", GatedMLP)
    rule = type(RULES["adamw"])
    right = rule.lr_factor
    monkeypatch.setattr(rule, "lr_factor", lambda *args: right(*args) ** power)
    section = {"name": "adamw", "lr": 1e-3}
    lines, good = check_sizes(
        config("plain", "adamw", optimizer=section), [64, 128, 256], [], False
    )
    marked = {line.split("  ")[0] for line in lines if line.endswith(" !")}
    assert (good, marked) == (not wrong, wrong)


def test_widths_that_do_not_divide_are_refused(plugin, monkeypatch):
    with pytest.raises(UserError, match=r"width 40 is 0.625 times 64, and so model.n_head = 4"):
        sized(config("gpt2", "adamw"), 40)
    monkeypatch.setattr(plugin.PlainArgs, "grows", ())
    with pytest.raises(UserError, match="does not say what grows with its width"):
        sized(config("plain", "adamw"), 128)
    large = sized(config("llama", "adamw"), 192, 5).model
    shape = (large.n_embd, large.n_head, large.n_kv_head, large.n_inner, large.n_layer)
    assert shape == (192, 12, 6, 576, 5)
    assert replace(large, n_layer=2) == sized(config("llama", "adamw"), 192).model


def test_exponents_are_slopes_of_logarithms():
    sizes = {width: {"a": 3 * width**0.5, "b": 2.0, "c": 0.0} for width in (16, 64, 128)}
    found = exponents(sizes)
    assert (found["a"], found["b"]) == pytest.approx((0.5, 0)) and math.isnan(found["c"])


def test_a_change_of_logits_may_fall_to_what_is_learned():
    """Of c + k / width at the widest: with c = k / width there, a quarter. Over depth it is not."""

    def power(square, along="width"):
        sizes = {width: {"change of logits": square(width) ** 0.5} for width in (64, 128, 256)}
        return exponents(sizes, along)["change of logits"]

    assert power(lambda width: 1 + 256 / width) == pytest.approx(-0.25)
    assert power(lambda width: 1 + 256 / width, "depth") == pytest.approx(-0.33, abs=0.01)
    assert power(lambda width: 1 / width) == pytest.approx(-0.5)  # nothing is learned
    assert power(lambda width: width**2) == pytest.approx(1)
    assert power(lambda width: width**-2) < -0.9
