"""Matrices that are stored as one: how models of transformers, and others, are cut."""

import warnings

import pytest
import torch
from torch import nn

from tests.support.full import FULL
from torchmars.optim import MARS, param_groups
from torchmars.optim.roles import cut_of, roles

CUT = ("flatten", "split", "transposed", "zero_mean")


def cuts(model, rule="mars-m", **given):
    """Return by name the role of each parameter of two dims or more, and how it is cut."""
    found = {}
    for group in param_groups(model, rule, **given):
        cut = {name: group[name] for name in CUT if group.get(name)}
        found |= {name: (group["role"], cut) for name, p in group["params"] if p.ndim > 1}
    return found


class Conv1D(nn.Module):
    """As transformers': a linear layer that keeps its weight as [in, out]."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf, self.weight = outputs, nn.Parameter(torch.randn(inputs, outputs))


class Experts(nn.Module):
    def __init__(self, gate_up, down, **more):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(s)) for s in (gate_up, down))
        vars(self).update(more)


class MixtralTopKRouter(nn.Linear):
    pass


class Mixture(nn.Module):
    def __init__(self, experts, gate):
        super().__init__()
        self.gate, self.experts = gate, experts


def block():
    """Return a model with matrices that are several, of each kind."""
    stacks = {
        "rows": Experts((4, 12, 8), (4, 8, 6)),
        "columns": Experts((4, 8, 12), (4, 6, 8)),
        "turns": Experts((4, 8, 12), (4, 6, 8), is_concatenated=False),
        "square": Experts((4, 8, 8), (4, 8, 4)),
    }
    layers = {
        "gpt2": nn.ModuleDict({"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)}),
        "attn": nn.MultiheadAttention(8, 2),
        "vit": nn.ModuleDict({"qkv": nn.Linear(8, 24)}),
        "mlp": nn.ModuleDict({"gate_up_proj": nn.Linear(8, 16), "gate_proj": nn.Linear(8, 16)}),
        "conv": nn.ModuleDict({"depth": nn.Conv1d(8, 8, 4, groups=8), "all": nn.Conv1d(8, 8, 4)}),
        "grouped": nn.Conv2d(8, 6, 3, groups=2),
        "grey": nn.Conv2d(1, 6, 3),
        "moe": Mixture(stacks["rows"], MixtralTopKRouter(8, 4)),
        "deep": Mixture(stacks["columns"], nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))),
        "gated": nn.ModuleDict({"gate": nn.Linear(8, 8)}),
        "turns": stacks["turns"],
        "square": stacks["square"],
    }
    return nn.ModuleDict(layers)


def test_what_is_known_is_cut_and_what_is_not_is_whole():
    halves, stored = {"split": 2}, {"transposed": True}
    wanted = {
        "gpt2.c_attn.weight": {"split": 3} | stored,
        "gpt2.c_proj.weight": stored,
        "attn.in_proj_weight": {"split": 3},
        "attn.out_proj.weight": {},
        "vit.qkv.weight": {"split": 3},
        "mlp.gate_up_proj.weight": halves,
        "mlp.gate_proj.weight": {},
        "conv.all.weight": {"flatten": True},
        "grouped.weight": {"flatten": True, "split": 2},
        "grey.weight": {"flatten": True},
        "moe.experts.gate_up_proj": halves,
        "moe.experts.down_proj": {},
        "moe.gate.weight": {"zero_mean": True},
        "deep.experts.gate_up_proj": halves | stored,
        "deep.experts.down_proj": stored,
        "deep.gate.0.weight": {},
        "deep.gate.1.weight": {},
        "gated.gate.weight": {},
        "turns.gate_up_proj": {"split": (1, 1)} | stored,
        "turns.down_proj": stored,
        "square.gate_up_proj": halves,
        "square.down_proj": {},
    }
    found = cuts(block())
    roles = {name: role for name, (role, _) in found.items()}
    assert roles.pop("conv.depth.weight") == "vector" and found.pop("conv.depth.weight")[1] == {}
    assert {name: cut for name, (_, cut) in found.items()} == wanted
    assert [name for name, role in roles.items() if role == "router"] == [
        "moe.gate.weight",
        "deep.gate.1.weight",
    ]
    # Written by hand it stays as it is written, and so does all with split_fused=False.
    by_hand = cuts(
        block(), by_pattern=[("vit.*", {"split": 1}), ("moe.gate*", {"zero_mean": False})]
    )
    assert by_hand["vit.qkv.weight"][1] == {"split": 1} and not by_hand["moe.gate.weight"][1]
    whole = cuts(block(), split_fused=False)
    assert {name for name, (_, cut) in whole.items() if set(cut) & {"split", "transposed"}} == set()
    assert not any(cut for _, cut in cuts(block(), "adamw").values() if "split" in cut)


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo", "muon"])
def test_every_cut_steps(rule):
    model = block()
    optimizer = MARS(param_groups(model, rule))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys()
    gate = model["moe"].gate.weight.detach() - 0.9994 * before["moe.gate.weight"]
    assert rule == "mars-shampoo" or gate.mean(0).norm() < 1e-3 * gate.norm()


def test_another_name_needs_the_line_that_cuts_it():
    model = nn.ModuleDict({str(i): nn.ModuleDict({"w12": nn.Linear(8, 16)}) for i in (0, 1)})
    assert cuts(model)["1.w12.weight"] == ("matrix", {})
    found = cuts(model, by_pattern=[("*.w12.weight", {"split": 2})])
    assert found["1.w12.weight"][1] == {"split": 2}


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, vocab_size=64, head_dim=8, moe_intermediate_size=24)
ROUTED = dict(num_experts=4, num_experts_per_tok=2)
WHOLE, HALVES, STORED = ("matrix", {}), ("matrix", {"split": 2}), ("matrix", {"transposed": True})
SOFTMAX = ("router", {"zero_mean": True})
# By the end of a name: the role, and how it is cut, as the forward pass of the class says.
MODELS = {
    "GPT2": (
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
        {
            "c_attn.weight": ("matrix", {"split": 3, "transposed": True}),
            "c_fc.weight": STORED,
            "wte.weight": ("embedding", {}),
        },
    ),
    "Llama": (SMALL, {"q_proj.weight": WHOLE, "lm_head.weight": ("head", {})}),
    "Qwen3": (SMALL, {"q_proj.weight": WHOLE, "down_proj.weight": WHOLE}),
    "Qwen3Moe": (
        SMALL | ROUTED,
        {"mlp.gate.weight": SOFTMAX, "experts.gate_up_proj": HALVES, "experts.down_proj": WHOLE},
    ),
    "Phi3": (SMALL | dict(pad_token_id=0), {"gate_up_proj.weight": HALVES}),
    "Mixtral": (
        SMALL | dict(num_local_experts=4),
        {"mlp.gate.weight": SOFTMAX, "experts.gate_up_proj": HALVES, "experts.down_proj": WHOLE},
    ),
    "GptOss": (
        SMALL | dict(num_local_experts=4),
        {
            "mlp.router.weight": ("router", {}),
            "experts.gate_up_proj": ("matrix", {"split": (1, 1), "transposed": True}),
            "experts.down_proj": STORED,
        },
    ),
    "Mamba": (
        dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8, time_step_rank=4),
        {"conv1d.weight": ("vector", {}), "A_log": ("vector", {})},
    ),
}


@FULL
@pytest.mark.parametrize("family", MODELS)
def test_models_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    settings, wanted = MODELS[family]
    ending = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}{ending}")(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = cuts(model)
        MARS(param_groups(model, "mars-m"))
    for end, expected in wanted.items():
        of_end = {name: each for name, each in found.items() if name.endswith(end)}
        assert of_end and all(each == expected for each in of_end.values()), (end, of_end)


class FSDPMixtralTopKRouter(MixtralTopKRouter):
    """As FSDP2 makes a class of its own of each that it shards."""


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._checkpoint_wrapped_module = module


def test_a_class_of_its_own_and_a_wrapper_hide_no_cut():
    model = nn.ModuleDict({"qkv": Wrapper(nn.Linear(8, 24))})
    name, parameter = next(model.named_parameters())
    assert cut_of(name, parameter, dict(model.named_modules())) == {"split": 3}
    mixture = Mixture(Experts((4, 12, 8), (4, 8, 6)), FSDPMixtralTopKRouter(8, 4))
    assert cuts(mixture)["gate.weight"] == ("router", {"zero_mean": True})


RECURRENT = [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)]
RECURRENT += [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)]


@pytest.mark.parametrize("kind,gates", RECURRENT)
def test_the_gates_of_torchs_recurrent_layers_are_matrices_of_their_own(kind, gates):
    model = nn.ModuleDict({"rnn": kind(6, 5)})
    for name in (each for each, p in model.named_parameters() if p.ndim == 2):
        found = cut_of(name, model.get_parameter(name), dict(model.named_modules()))
        assert found == ({"split": gates} if gates > 1 else {})


class GateBesideExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts_w1 = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6))


def test_a_gate_beside_what_is_named_as_experts_is_a_router():
    both = nn.ModuleDict({"a": GateBesideExperts(), "b": nn.Module()})
    both["b"].gates = nn.ModuleList([nn.Linear(6, 4, bias=False)])
    both["b"].experts = nn.ModuleList([nn.Linear(6, 6, bias=False)])
    found = roles(both)
    assert found["a.gate"] == found["b.gates.0.weight"] == "router"
    assert found["a.experts_w1"] == found["b.experts.0.weight"] == "matrix"
