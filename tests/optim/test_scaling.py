"""What learning rates are times at another shape: by hand, from the shapes of two models."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from torchmars.config.deepseek import SIZES as SIZES_OF_DEEPSEEK
from torchmars.config.deepseek import DeepseekArgs
from torchmars.config.gpt2 import GPT2Args
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.optim import MARS, param_groups, transfer_factors
from torchmars.optim.rules import RULES, ElementwiseRule, Muon

EVERY = ("logits", "residual", "attention")


class Attention(nn.Module):
    def __init__(self, width, kv, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, kv, bias=False)
        self.proj = nn.Linear(width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width, inner, kv, head_dim):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, kv, head_dim)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, width, inner))
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(width, 3 * width, 5)


class Own(nn.Module):
    """A user's model: blocks of all kinds of matrices, in no family of ours."""

    multipliers = EVERY

    def __init__(self, layers, width, inner, kv=16, head_dim=8):
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, inner, kv, head_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)


def settings_of(rule, model, base, per_head=None, **options):
    """Return the settings of each parameter over those without factors, by name."""
    names, keys = ("lr", "weight_decay", "eps"), {}
    factors = transfer_factors(model, base, **options)
    for number, given in enumerate((None, factors)):
        more = {} if per_head is None else {"per_head": per_head}
        for group in param_groups(model, rule, factors=given, **more):
            for name, _ in group["params"]:
                keys.setdefault(name, [None, None])[number] = {each: group[each] for each in names}
    return {
        name: {each: now[each] / was[each] for each in names if was[each]}
        for name, (was, now) in keys.items()
    }


@dataclass(frozen=True)
class PlainSettings:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)


def test_a_rule_of_a_users_may_have_neither_decay_nor_eps(monkeypatch):
    class Plain(ElementwiseRule):
        name, config = "plain", PlainSettings

        def buffers(self, clip, exact, stacks):
            return ("exp_avg", "exp_avg_sq")

        def momentum(self, old, c, f):
            return (f.beta1 * old[0] + f.rate1 * c, old[1] + c * c)

        def direction(self, old, new, c, f):
            return new[0]

    monkeypatch.setitem(RULES, "plain", Plain())
    base, model = Own(2, 16, 32), Own(2, 32, 64)
    groups = param_groups(model, "plain", factors=transfer_factors(model, base))
    assert any(group["lr"] == 5e-4 for group in groups)


# Of each matrix the sides over the base's at r = 3: q and router [E stays], k [3 heads stay] ...
LR = {
    # Entries of a step are of one size: lr goes with 1 / in, whatever out does.
    "adamw": {"q": 1 / 3, "k": 1 / 3, "router": 1 / 3, "experts": 1 / 3, "gate_up": 1 / 3},
    # An orthogonal step times 0.2 max^(1/2): (out / in)^(1/2) over that scale's ratio.
    "muon": {"q": 3**-0.5, "k": 1 / 3, "router": 1 / 3, "experts": 3**-0.5, "gate_up": 3**-0.5},
    # max(1, out / in)^(1/2): 1 where all grows; where out stays, 3^(-1/2), as no scale is above 1.
    "mars-shampoo": {"q": 1, "k": 3**-0.5, "router": 3**-0.5, "experts": 1, "gate_up": 1},
}
SAME = {"lion": "adamw", "mars-adamw": "adamw", "mars-lion": "adamw", "mars-m": "muon"}


@pytest.mark.parametrize("rule", RULES)
def test_factors_by_hand_where_all_grows_and_kv_heads_and_experts_stay(rule):
    found = settings_of(rule, Own(2, 192, 384), Own(2, 64, 128))
    expected = LR[SAME.get(rule, rule)]
    names = {"q": "attn.q.weight", "k": "attn.k.weight", "router": "router.weight"}
    names |= {"experts": "experts", "gate_up": "gate_up_proj.weight", "conv": "conv.weight"}
    for name, factor in (expected | {"conv": expected["q"]}).items():
        each = found[f"blocks.1.{names[name]}"]
        assert each["lr"] == pytest.approx(factor, rel=1e-9), name
        assert each["weight_decay"] == pytest.approx(1 / factor, rel=1e-9), name
    for name in ("tokens.weight", "head.weight", "norm.weight", "blocks.0.attn.q.bias"):
        assert found[name]["lr"] == 1 and found[name].get("weight_decay", 1) == 1
        vector = name not in ("tokens.weight", "head.weight")  # AdamW's, under mars-lion
        has_eps = rule not in ("lion", "mars-lion") or (vector and rule == "mars-lion")
        assert found[name]["eps"] == pytest.approx(1 / 3 if has_eps else 1), name


def test_eps_and_depth_follow_the_table():
    large, base = Own(10, 192, 384), Own(2, 64, 128)
    for depth, rate, power in (("1/L", 1, 1), ("1/sqrt(L)", 5**-0.5, 0.5), ("none", 1, 0)):
        found = settings_of("adamw", large, base, depth=depth, decay="coupled")
        matrix, norm = found["blocks.9.attn.proj.weight"], found["blocks.9.norm.weight"]
        assert matrix["lr"] == pytest.approx(rate / 3) and norm["lr"] == pytest.approx(rate)
        assert matrix["weight_decay"] == 1
        assert matrix["eps"] == norm["eps"] == pytest.approx(1 / 3 / 5**power)
        assert found["norm.weight"]["lr"] == 1  # of no block
        assert found["norm.weight"]["eps"] == pytest.approx(1 / 3)
        assert found["tokens.weight"]["lr"] == 1
        factors = transfer_factors(large, base, depth=depth)
        expected = {"logits": 1 / 3, "residual": 5**-power, "attention": 1}
        assert factors.multipliers == pytest.approx(expected)
        assert factors.std["blocks.3.conv.weight"] == pytest.approx(3**-0.5)
        assert "tokens.weight" not in factors.std and "head.weight" not in factors.std


def test_only_what_grows_changes():
    base = Own(2, 64, 128)
    inner = settings_of("adamw", Own(2, 64, 640), base)
    changed = {name: each["lr"] for name, each in inner.items() if each["lr"] != 1}
    assert changed == {name: pytest.approx(0.2) for name in inner if name.endswith("experts")}
    assert all(each["eps"] == 1 for name, each in inner.items() if name not in changed)
    found = transfer_factors(Own(2, 64, 640), base).multipliers
    assert found == {"logits": 1, "residual": 1, "attention": 1}
    for deep in (Own(10, 64, 128), copy.deepcopy(base)):
        factors = transfer_factors(deep, base)
        assert set(factors.multipliers.values()) == set(factors.std.values()) == {1.0}
        for rule in RULES:
            groups, before = param_groups(deep, rule, factors=factors), param_groups(deep, rule)
            plain = [{**each, "params": None} for each in before]
            assert [{**each, "params": None} for each in groups] == plain
    wide = transfer_factors(Own(2, 64, 128, head_dim=32), base).multipliers["attention"]
    assert wide == pytest.approx(0.5)  # heads 4 times as wide: 1 / d instead of 1 / d^(1/2)


def test_pieces_of_a_split_count_not_the_whole():
    # [128, 64] -> [128, 192]: of each half (1/3)^(1/2) / (1 / 1); of the whole the scale falls from
    # 2^(1/2) to 1.
    large, base = Own(1, 192, 64), Own(1, 64, 64)
    factors, name = transfer_factors(large, base), "blocks.0.gate_up_proj.weight"

    def lr(**options):
        groups = param_groups(large, "mars-shampoo", lr=1.0, factors=factors, **options)
        return next(each["lr"] for each in groups if name in dict(each["params"]))

    assert lr() == pytest.approx(3**-0.5)
    assert lr(split_fused=False) == pytest.approx(3**-0.5 * 2**0.5)


def test_a_rule_of_ones_own_follows_from_its_scale(monkeypatch):
    class Rows(Muon):
        name = "rows"

        def scale(self, rows, cols):
            return rows**0.5

    monkeypatch.setitem(RULES, "rows", Rows())
    found = settings_of("rows", Own(1, 192, 384), Own(1, 64, 128))
    assert found["blocks.0.attn.q.weight"]["lr"] == pytest.approx(3**-0.5)
    assert found["blocks.0.attn.k.weight"]["lr"] == pytest.approx(3**-0.5)  # its rows stay


def test_matrices_that_transformers_stores_transposed():
    from transformers import GPT2Config, GPT2LMHeadModel

    def model(width, heads):
        with torch.device("meta"):
            config = GPT2Config(n_embd=width, n_head=heads, n_inner=64, n_layer=1, vocab_size=9)
            return GPT2LMHeadModel(config)

    large, base = model(96, 6), model(32, 2)
    factors = transfer_factors(large, base, applied=EVERY)
    assert factors.multipliers == pytest.approx({"logits": 1 / 3, "residual": 1, "attention": 1})
    rates = {
        name.removeprefix("transformer.h.0."): group["lr"]
        for group in param_groups(large, "adamw", lr=1.0, factors=factors)
        for name, _ in group["params"]
    }
    assert rates["mlp.c_fc.weight"] == rates["attn.c_attn.weight"] == pytest.approx(1 / 3)
    assert rates["mlp.c_proj.weight"] == 1  # [64, 96] there is [in, out]: its 64 inputs stay


def test_patterns_and_roles_keep_factors_and_roles_their_names():
    large, base = Own(2, 192, 384), Own(2, 64, 128)
    factors = transfer_factors(large, base)
    groups = param_groups(
        large,
        "muon",
        lr=1.0,
        by_role={"router": {"rule": "adamw", "lr": 0.3}},
        by_pattern=[("blocks.*.attn.*", {"lr": 0.6, "weight_decay": 0.2})],
        factors=factors,
    )
    rates = {}
    for group in groups:
        rates.setdefault(group["role"], set()).add(round(group["lr"], 6))
    assert rates["blocks.*.attn.*"] == {round(0.6 * 3**-0.5, 6), round(0.2, 6), 0.6}  # q, k, bias
    assert rates["router"] == {0.1} and rates["head"] == {1.0}
    wrapped = torch.nn.parallel.DataParallel(large)  # another prefix of all names, as DDP's
    outer = param_groups(wrapped, "muon", lr=1.0, factors=factors)
    inner = param_groups(large, "muon", lr=1.0, factors=factors)
    assert [group["lr"] for group in outer] == [group["lr"] for group in inner]
    named = [name for group in groups for name, _ in group["params"]]
    assert sorted(named) == sorted(name for name, _ in large.named_parameters())
    MARS(groups)  # takes them


def test_refusals_name_the_parameter_and_the_remedy():
    base = Own(2, 64, 128)
    with pytest.raises(ValueError, match="the multiplier 'logits', here 0.5: let it, and name it"):
        transfer_factors(Own(2, 128, 128), base, applied=())
    transfer_factors(Own(2, 128, 128), base, applied=("logits",))
    with pytest.raises(ValueError, match="residual"):
        transfer_factors(Own(4, 64, 128), base, depth="1/L", applied=("logits",))
    large = Own(2, 128, 128)
    large.more = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"the base has no more\.weight"):
        transfer_factors(large, base)
    large = Own(2, 128, 128)
    large.norm = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"norm\.weight has 2 dims, but 1 in the base"):
        transfer_factors(large, base)
    flat = nn.Linear(4, 4)
    assert transfer_factors(flat, flat).multipliers["residual"] == 1
    for depth in ("1/L", "1/sqrt(L)"):
        with pytest.raises(ValueError, match=f"{re.escape(depth)}.* Linear has no module of numb"):
            transfer_factors(flat, flat, depth=depth)
    with pytest.raises(ValueError, match="^decay must be "):
        transfer_factors(base, base, decay=None)
    with pytest.raises(ValueError, match="depth must be one of none, "):
        transfer_factors(base, base, depth="L")
    with pytest.raises(ValueError, match=r"factors know no parameter 'more\.weight' of"):
        other = Own(2, 64, 128)
        other.more = nn.Linear(3, 3)
        param_groups(other, factors=transfer_factors(base, base))
    with pytest.raises(ValueError, match=r"of the shape .* make them of this model"):
        param_groups(base, factors=transfer_factors(Own(2, 128, 128), base))


def test_heads_may_be_more_than_in_the_base():
    """Of a head [8, 48] and [8, 16]: (1/3)^(1/2), over that ratio of 0.2 max^(1/2), 3^(1/2)."""

    def model(n_head):
        shape = {"vocab_size": 16, "seq_len": 4, "n_layer": 1, "n_embd": 8 * n_head}
        return GPT2(GPT2Args(n_head=n_head, **shape))

    found = settings_of("muon", model(6), model(2), per_head=True)
    assert found["blocks.0.attn.qkv.weight"]["lr"] == pytest.approx(1 / 3)
    assert found["blocks.0.attn.proj.weight"]["lr"] == pytest.approx(3**-0.5)
    assert settings_of("muon", model(2), model(2), per_head=True) == settings_of(
        "muon", model(2), model(2), per_head=False
    )


def test_pieces_of_heads_are_paired_before_equal_ones_are_left_out():
    """Here keys and values of a head are of one shape, [8, 24], in the base of two."""

    def model(nope, latent):
        shape = SIZES_OF_DEEPSEEK["nano"] | {"n_layer": 1, "n_embd": 32, "n_head": 2}
        shape |= {"qk_nope_head_dim": nope, "v_head_dim": 8, "kv_lora_rank": latent}
        return Deepseek(DeepseekArgs(vocab_size=16, seq_len=4, **shape))

    factors = transfer_factors(model(8, 24), model(4, 12))
    twin = factors.twins["blocks.0.attn.kv_b.weight"]
    cut = {"split": (8, 8, 8, 8), "per_head": True}
    assert twin.pieces({}, cut) == [((8, 24), (4, 12)), ((8, 24), (8, 12))]
