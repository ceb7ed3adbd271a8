"""Roles by the names of torchvision, timm and transformers."""

import warnings

import pytest
import torch
from torch import nn

from tests.support.full import FULL
from torchmars.optim import param_groups
from torchmars.optim.roles import roles


def matrices(model):
    """Return the roles of all parameters but the vectors of one dim."""
    sizes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    return {
        name: role for name, role in roles(model).items() if sizes[name] > 1 or role != "vector"
    }


class Block(nn.Module):
    """A hidden block whose layers have the names of heads."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"q_head": nn.Linear(8, 8), "output": nn.Linear(8, 8)})
        self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "score": nn.Linear(16, 8)})
        self.gate = nn.Parameter(torch.zeros(1, 8))
        self.scale = nn.Parameter(torch.zeros(8, 1, 1))  # as ConvNeXt's in torchvision


class ViT(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.cls_token, self.reg_token = (
            nn.Parameter(torch.zeros(1, 1, 8)),
            nn.Parameter(torch.zeros(1, 4, 8)),
        )
        self.pos_embed, self.pos_embedding = (
            nn.Parameter(torch.zeros(1, 9, 8)),
            nn.Parameter(torch.zeros(1, 9, 8)),
        )
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 8, 4)})
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm((9, 8))
        for name, layer in head.items():
            setattr(self, name, layer)


@pytest.mark.parametrize(
    "head,expected",
    [
        ({"head": nn.Linear(8, 5)}, {"head.weight"}),
        ({"fc": nn.Linear(8, 5)}, {"fc.weight"}),
        ({"score": nn.Linear(8, 1, bias=False)}, {"score.weight"}),
        ({"embed_out": nn.Linear(8, 5)}, {"embed_out.weight"}),
        ({"heads": nn.ModuleDict({"head": nn.Linear(8, 5)})}, {"heads.head.weight"}),
        (
            {"head": nn.ModuleDict({"norm": nn.LayerNorm(8), "fc": nn.Linear(8, 5)})},
            {"head.fc.weight"},
        ),
        (
            {"head": nn.Linear(8, 5), "head_dist": nn.Linear(8, 5)},
            {"head.weight", "head_dist.weight"},
        ),
        ({"pre_classifier": nn.Linear(8, 8), "classifier": nn.Linear(8, 5)}, {"classifier.weight"}),
        (
            {"classifier": nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))},
            {"classifier.2.weight"},
        ),
        ({"pooler": nn.ModuleDict({"dense": nn.Linear(8, 8)})}, set()),
    ],
)
def test_a_vision_transformer_with_every_kind_of_head(head, expected):
    found = matrices(ViT(head))
    assert {name for name, role in found.items() if role == "head"} == expected
    assert {name for name, role in found.items() if role == "embedding"} == {
        "cls_token",
        "reg_token",
        "pos_embed",
        "pos_embedding",
    }
    assert {name for name, role in found.items() if role == "vector"} == (
        {"norm.weight", "norm.bias"}
        | {f"blocks.{i}.{name}" for i in (0, 1) for name in ("gate", "scale")}
    )
    hidden = {
        f"blocks.{i}.{name}.weight"
        for i in (0, 1)
        for name in ("attn.q_head", "attn.output", "mlp.fc", "mlp.score")
    }
    assert hidden <= {name for name, role in found.items() if role == "matrix"}
    assert found["patch_embed.proj.weight"] == "convolution"


def test_the_last_layer_of_a_classifier():
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 5))
    assert [role for role in roles(layers).values() if role != "vector"] == [
        "convolution",
        "matrix",
        "head",
    ]
    wrapped = roles(
        nn.ModuleDict({"module": nn.ModuleDict({"layer1": nn.Linear(8, 8), "fc": nn.Linear(8, 5)})})
    )
    assert wrapped["module.fc.weight"] == "head" and wrapped["module.layer1.weight"] == "matrix"
    lone = nn.ModuleDict(
        {"embed": nn.Embedding(9, 8), "mlp": nn.ModuleDict({"fc": nn.Linear(8, 8)})}
    )
    assert roles(lone)["mlp.fc.weight"] == "matrix"
    assert roles(nn.Linear(8, 5)) == {"weight": "matrix", "bias": "vector"}


class Decoder(nn.Module):
    """Tokens, blocks whose layers have the names of heads, a head, and a layer after it."""

    def __init__(self, name="to_logits", head=None, tokens=11):
        super().__init__()
        self.tok, self.wpe = nn.Embedding(tokens, 8), nn.Embedding(16, 8)
        names = ("output_layer", "proj_out")
        self.blocks = nn.ModuleList(
            nn.ModuleDict({each: nn.Linear(8, 8) for each in names}) for _ in range(2)
        )
        if head is not None:
            setattr(self, name, head)
        self.value = nn.ModuleDict({"up": nn.Linear(8, 6)})


@pytest.mark.parametrize(
    "name,head",
    [
        ("to_logits", nn.Linear(8, 11)),
        ("to_logits", nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 11))),
        ("output_layer", nn.Linear(8, 11)),
        ("proj_out", nn.Linear(8, 11)),
        ("predictions", nn.ModuleDict({"decoder": nn.Linear(8, 11)})),  # as BERT's
        ("generator", nn.ModuleDict({"proj": nn.Linear(8, 11)})),  # of the annotated transformer
    ],
)
def test_the_layer_with_as_many_rows_as_tokens_is_the_head(name, head):
    found = matrices(Decoder(name, head))
    assert [each.split(".")[0] for each, role in found.items() if role == "head"] == [name]
    assert {role for each, role in found.items() if "blocks" in each} == {"matrix"}
    assert found["value.up.weight"] == "matrix"


def test_no_second_layer_is_a_head_beside_a_named_or_tied_one():
    for head in ({"lm_head": nn.Linear(8, 11)}, {}):
        model = Decoder()
        model.extra = nn.ModuleDict({"up": nn.Linear(8, 11), **head})
        if not head:
            model.extra["shared"] = nn.Linear(8, 11)
            model.extra["shared"].weight = model.tok.weight
        assert matrices(model)["extra.up.weight"] == "matrix"


@pytest.mark.parametrize(
    "name,shape,role",
    [
        ("W_U", (8, 11), "head"),
        ("codebook", (5, 8), "embedding"),
        ("bigram", (11, 11), "embedding"),
        ("lookup", (11, 4), "embedding"),
        ("mixing", (8, 8), "matrix"),
    ],
)
def test_raw_tables_are_no_hidden_matrices(name, shape, role):
    model = Decoder()
    model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert roles(model)[name] == role


def test_the_tables_of_transformer_lens():
    model = nn.Module()
    shapes = {"W_E": (11, 8), "W_pos": (16, 8), "W_in": (8, 32), "W_U": (8, 11)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert list(roles(model).values()) == ["embedding", "embedding", "matrix", "head"]


@pytest.mark.parametrize(
    "name", ["lambdas", "mlp_scale", "skip_scalars", "x0_lambdas", "value_scales"]
)
def test_raw_scales_are_vectors(name):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.zeros(2, 12)))
    assert roles(model) == {name: "vector"}


def test_what_cannot_be_told_apart_is_said_once_with_the_line_to_write():
    """Each layer has as many rows as there are tokens, and no name says which is the head."""
    model = Decoder("readout", nn.ModuleDict({"proj": nn.Linear(8, 8)}), tokens=8)
    with pytest.warns(UserWarning, match='by_pattern=.."readout.proj.weight"') as found:
        param_groups(model, "muon")
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = param_groups(
            model, "muon", by_pattern=[("readout.proj.weight", {"rule": "adamw"})]
        )
        param_groups(model, "adamw")
        param_groups(Decoder("to_logits", nn.Linear(8, 8), tokens=8), "muon")
    [of_head] = [each for each in groups if each["role"] == "readout.proj.weight"]
    assert of_head["rule"] == "adamw"


@FULL
def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    small = dict(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=20,
    )
    made = {
        "GPT2LMHeadModel": transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20),
        "LlamaForCausalLM": transformers.LlamaConfig(**small),
        "LlamaForSequenceClassification": transformers.LlamaConfig(**small),
        "BertForSequenceClassification": transformers.BertConfig(**small),
        "RobertaForMaskedLM": transformers.RobertaConfig(**small),
        "RobertaForSequenceClassification": transformers.RobertaConfig(**small),
    }
    heads, hidden = {}, {}
    for name, config in made.items():
        with torch.device("meta"):
            found = matrices(getattr(transformers, name)(config))
        heads[name] = [each for each, role in found.items() if role == "head"]
        hidden[name] = [each for each, role in found.items() if role == "matrix"]
        assert all(
            "embed" in each or "wte" in each or "wpe" in each
            for each, role in found.items()
            if role == "embedding"
        )
    assert heads == {
        "GPT2LMHeadModel": [],
        "LlamaForCausalLM": ["lm_head.weight"],
        "LlamaForSequenceClassification": ["score.weight"],
        "BertForSequenceClassification": ["classifier.weight"],
        "RobertaForMaskedLM": [],
        "RobertaForSequenceClassification": ["classifier.out_proj.weight"],
    }
    assert {name: len(each) for name, each in hidden.items()} == {
        "GPT2LMHeadModel": 4,
        "LlamaForCausalLM": 7,
        "LlamaForSequenceClassification": 7,
        "BertForSequenceClassification": 7,
        "RobertaForMaskedLM": 7,
        "RobertaForSequenceClassification": 7,
    }
