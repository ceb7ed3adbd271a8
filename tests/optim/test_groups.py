"""Roles, groups, patterns: every parameter in one group, with the settings that were asked for."""

import pytest
import torch
from torch import nn

from torchmars.optim import MARS, param_groups
from torchmars.optim.groups import complete_settings


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(8, 24), "norm": nn.LayerNorm(8)}) for _ in range(2)
        )
        self.conv = nn.Conv1d(8, 4, 3)
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


def by_role(groups):
    return {group["role"]: {name for name, _ in group["params"]} for group in groups}


def test_roles():
    groups = param_groups(Model())
    assert by_role(groups) == {
        "embedding": {"embed.weight"},
        "head": {"lm_head.weight"},
        "convolution": {"conv.weight"},
        "matrix": {"blocks.0.qkv.weight", "blocks.1.qkv.weight", "experts"},
        "vector": {
            "blocks.0.qkv.bias",
            "blocks.1.qkv.bias",
            "blocks.0.norm.weight",
            "blocks.1.norm.weight",
            "blocks.0.norm.bias",
            "blocks.1.norm.bias",
            "conv.bias",
        },
    }


def test_a_tied_head_is_an_embedding():
    model = Model()
    model.lm_head.weight = model.embed.weight
    assert "head" not in by_role(param_groups(model))
    assert by_role(param_groups(model))["embedding"] == {"embed.weight"}


# For the matrices' rule and a role: the rule, the rate and the decay.
WHO = [
    ("mars-adamw", "matrix", "mars-adamw", 6e-3, 0.01),
    ("mars-adamw", "embedding", "mars-adamw", 6e-3, 0.0),
    ("mars-adamw", "head", "mars-adamw", 6e-3, 0.01),
    ("mars-adamw", "vector", "adamw", 3e-3, 0.1),
    ("mars-lion", "matrix", "mars-lion", 6e-4, 0.1),
    ("mars-lion", "embedding", "mars-lion", 6e-4, 0.0),
    ("mars-lion", "vector", "adamw", 3e-4, 0.1),
    ("mars-shampoo", "matrix", "mars-shampoo", 2e-2, 0.01),
    ("mars-shampoo", "embedding", "mars-adamw", 6e-3, 0.0),
    ("mars-shampoo", "head", "mars-adamw", 6e-3, 0.01),
    ("mars-shampoo", "vector", "adamw", 3e-3, 0.1),
    ("mars-m", "matrix", "mars-m", 6e-3, 0.1),
    *(("mars-m", role, "adamw", 6e-3, 0.1) for role in ("embedding", "head", "vector")),
    ("muon", "matrix", "muon", 6e-3, 0.1),
    *(("muon", role, "adamw", 6e-3, 0.1) for role in ("embedding", "vector")),
    *(("adamw", role, "adamw", 6e-4, 0.1) for role in ("matrix", "embedding")),
    ("adamw", "vector", "adamw", 6e-4, 0.0),
    *(("lion", role, "lion", 1e-4, 0.5) for role in ("matrix", "head")),
    ("lion", "vector", "lion", 1e-4, 0.0),
]


@pytest.mark.parametrize("name,role,rule,lr,weight_decay", WHO)
def test_who_gets_which_rule(name, role, rule, lr, weight_decay):
    optimizer = MARS(param_groups(Model(), name))
    found = next(group for group in optimizer.param_groups if group["role"] == role)
    assert (found["rule"], found["weight_decay"]) == (rule, weight_decay)
    assert found["lr"] == pytest.approx(lr)


def test_vectors_settings():
    groups = {
        group["role"]: group
        for group in param_groups(
            Model(), lr=0.1, lr_1d=0.01, betas_1d=(0.8, 0.9), weight_decay_1d=0.3
        )
    }
    assert (
        groups["vector"]["lr"],
        groups["vector"]["betas"],
        groups["vector"]["weight_decay"],
    ) == (0.01, (0.8, 0.9), 0.3)
    groups = {group["role"]: group for group in param_groups(Model(), optimize_1d=True)}
    assert groups["vector"]["rule"] == "mars-adamw"


def test_roles_and_patterns_replace_settings_and_the_first_pattern_wins():
    groups = param_groups(
        Model(),
        "mars-m",
        by_role={"embedding": {"lr": 1e-3}, "head": {"rule": "lion", "betas": (0.9, 0.98)}},
        by_pattern=[
            ("blocks.0.*weight", {"split": 3}),
            ("blocks.*.weight", {"rule": "adamw", "lr": 0.5}),
        ],
    )
    settings = {(group["role"], name): group for group in groups for name, _ in group["params"]}
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(
        name for name, p in Model().named_parameters() if p.requires_grad
    )
    first = settings["blocks.0.*weight", "blocks.0.qkv.weight"]
    assert (first["rule"], first["split"], first["lr"]) == ("mars-m", 3, 6e-3)
    assert (
        settings["blocks.0.*weight", "blocks.0.norm.weight"]["rule"] == "adamw"
    )  # a vector keeps its role's rule
    assert settings["blocks.*.weight", "blocks.1.qkv.weight"]["lr"] == 0.5
    assert settings["embedding", "embed.weight"]["lr"] == 1e-3
    assert settings["head", "lm_head.weight"]["rule"] == "lion"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(name="sgd"), "name must be one of"),
        (dict(name="adamw", gamma=0.1), "gamma has no meaning"),
        (dict(lr=-1.0), "lr must be"),
        (dict(lr_1d=-1.0), "lr_1d must be"),
        (dict(betas_1d=(1, 1)), "betas_1d must be"),
        (dict(clip=-1.0), "clip must be"),
        (dict(by_role={"heads": {}}), "by_role must name roles"),
        (dict(by_role={"matrix": {"lr": -1}}), "matrix.lr must be"),
        (dict(by_role={"matrix": {"learning": 1}}), "matrix.learning is no setting"),
        (dict(by_role={"vector": {"gamma": 0.1}}), 'vector.gamma has no meaning for "adamw"'),
        (dict(by_pattern=[("nothing", {})]), "'nothing' claims no parameter"),
        (dict(by_pattern=[("*", {}), ("embed.*", {})]), "'embed.\\*' claims no parameter"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), **arguments)


def test_clip_zero_is_off():
    assert all(group.get("clip") is None for group in param_groups(Model(), clip=0.0))
    assert complete_settings("mars-adamw", clip=0.0)["clip"] == 0.0


@pytest.mark.parametrize("name", ["mars-adamw", "mars-m"])
def test_a_small_convolutional_network_learns(name):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    optimizer = MARS(param_groups(model, name, lr=1e-2))
    for _ in range(60):  # does the image have a vertical or a horizontal stripe?
        labels = torch.randint(2, (32,))
        images = 0.3 * torch.randn(32, 1, 8, 8)
        for image, label, place in zip(images, labels, torch.randint(8, (32,)).tolist()):
            image[0].select(int(label), place).add_(2)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2


@pytest.mark.parametrize("rule", ["muon", "mars-m"])
def test_all_but_matrices_take_a_rate_of_their_own(rule):
    def rates(**settings):
        groups = param_groups(Model(), rule, lr=0.02, **settings)
        return {group["role"]: (group["rule"], group["lr"]) for group in groups}

    own = rates(lr_rest=0.003)
    for role in ("embedding", "head", "vector"):
        assert own[role] == ("adamw", 0.003)
    assert own["matrix"] == own["convolution"] == (rule, 0.02)
    assert rates() == rates(lr_rest=0.02)  # without it they take the matrices'
    with pytest.raises(ValueError, match="lr_rest must be at least 0"):
        rates(lr_rest=-1.0)
    for other in ("adamw", "mars-shampoo"):
        with pytest.raises(ValueError, match=f'lr_rest has no meaning for "{other}"'):
            param_groups(Model(), other, lr_rest=0.1)


class Heads(nn.Module):
    """A model whose attention says which rows are one head's."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.head_rows = {"qkv": 6, "out": 1}
        self.attn.qkv, self.attn.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        self.mlp = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.LayerNorm(8)])


def test_per_head_takes_the_split_that_a_model_declares_and_nothing_else():
    def split(rule="muon", **options):
        groups = param_groups(Heads(), rule, **options)
        return {
            name: (each.get("split", 1), each.get("per_head", False))
            for each in groups
            for name, _ in each["params"]
            if each["rule"] == rule
        }

    names = ("attn.qkv.weight", "attn.out.weight", "mlp.0.weight")
    by_head = dict(zip(names, [(6, True), (1, False), (1, False)]))
    assert split() == split("mars-m") == split(split_fused=False) == by_head
    assert split("mars-shampoo", per_head=True) == split(per_head=True) == by_head
    assert split("mars-shampoo", by_role={"matrix": {"per_head": True}}) == by_head
    own = [("*.qkv.*", {"per_head": False, "split": 3})]
    assert split(per_head=True, by_pattern=own)["attn.qkv.weight"] == (3, False)
    assert split(by_pattern=[("*.qkv.*", {"split": 3})])["attn.qkv.weight"] == (3, False)
    by_pattern = [("*.qkv.*", {"per_head": True})]
    assert split(per_head=False, by_pattern=by_pattern)["attn.qkv.weight"] == (6, True)
    assert split(per_head=False)["attn.qkv.weight"] == (3, False)  # as it is fused
    assert split("mars-shampoo")["attn.qkv.weight"] == (3, False)
    assert split(per_head=False, split_fused=False)["attn.qkv.weight"] == (1, False)
    wrapped = nn.Module()
    wrapped.module = Heads()  # as DDP does
    assert {each.get("split", 1) for each in param_groups(wrapped, "muon", per_head=True)} == {1, 6}
    by_adamw = param_groups(Heads(), "muon", per_head=True, by_pattern=[("*", {"rule": "adamw"})])
    assert not any("per_head" in each or "split" in each for each in by_adamw)


@pytest.mark.parametrize(
    "model,options,message",
    [
        (Model, {"per_head": True}, "per_head has no meaning for a Model, whose attention decl"),
        (Heads, {"name": "adamw", "per_head": True}, 'per_head has no meaning for "adamw"'),
        (Heads, {"per_head": 3}, "per_head must be true, false or auto"),
        (
            Heads,
            {"by_role": {"matrix": {"per_head": True, "split": 3}}},
            "matrix.split does not go with per_head",
        ),
        (
            Heads,
            {"per_head": True, "by_pattern": [("*.qkv.*", {"split": 3})]},
            "qkv.*.split does not go with per_head.* or set per_head = false",
        ),
        (
            Heads,
            {"by_role": {"embedding": {"per_head": True}}},
            'embedding.per_head has no meaning for "adamw"',
        ),
    ],
)
def test_per_head_is_refused_where_it_means_nothing(model, options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(model(), **{"name": "muon"} | options)


def test_per_head_needs_the_model_and_cannot_change():
    layer = nn.Linear(4, 12, bias=False)
    with pytest.raises(ValueError, match=r"per_head of group 0 needs the model.*param_groups\("):
        MARS(layer.parameters(), rule="muon", per_head=True)
    model = Heads()
    optimizer = MARS(param_groups(model, "muon", per_head=True))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    group = next(each for each in optimizer.param_groups if each.get("per_head"))
    for key, value in (("per_head", False), ("split", 3)):
        before, group[key] = group[key], value
        with pytest.raises(ValueError, match=f"{key} of group . was .* and cannot change"):
            optimizer.step()
        group[key] = before
