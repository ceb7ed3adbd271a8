"""Matrices that are stored as one: how models of transformers, and others, are cut."""

import warnings

import pytest
import torch
from torch import nn

from tests.support.full import FULL
from torchmars.optim import MARS, param_groups
from torchmars.optim.fused import cut_of, looks_fused
from torchmars.optim.roles import roles

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


class BloomAttention(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(8, 24)


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
        "bloom": BloomAttention(),
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
        "bloom.query_key_value.weight": {"split": (4, 4, 4)},
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


def test_what_only_looks_fused_is_said_once_with_the_line_to_write():
    names = ("qkv_proj", "fused_qkv", "w12")
    layers = {str(i): nn.ModuleDict({name: nn.Linear(8, 24) for name in names}) for i in (0, 1)}
    model = nn.ModuleDict({"layers": nn.ModuleDict(layers), "qk_norm": nn.Linear(8, 8)})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        param_groups(model, "muon")
        param_groups(model, "adamw")
        param_groups(model, "muon", split_fused=False)
    [message] = [str(each.message) for each in found]
    assert message.startswith("'layers.0.qkv_proj.weight' and 5 more look like several matrices")
    assert """by_pattern=[('layers.*.qkv_proj.weight', {"split": 3})]""" in message
    lines = [(f"layers.*.{name}.weight", {"split": 3}) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuts(model, "muon", by_pattern=lines)["layers.1.w12.weight"][1] == {"split": 3}


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, vocab_size=64, head_dim=8, moe_intermediate_size=24)
ROUTED = dict(num_experts=4, num_experts_per_tok=2)
# By the end of a name: the role, and how it is cut, as the forward pass of the class says.
MODELS = {
    "GPT2": (
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
        {
            "c_attn.weight": ("matrix", {"split": 3, "transposed": True}),
            "c_fc.weight": ("matrix", {"transposed": True}),
        },
    ),
    "Llama": (SMALL, {"q_proj.weight": ("matrix", {}), "lm_head.weight": ("head", {})}),
    "Phi3": (
        SMALL | dict(pad_token_id=0),
        {
            "qkv_proj.weight": ("matrix", {"split": (32, 16, 16)}),
            "gate_up_proj.weight": ("matrix", {"split": 2}),
        },
    ),
    "GPTNeoX": (SMALL, {"query_key_value.weight": ("matrix", {"split": (8, 8, 8)})}),
    "Bloom": (
        dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
        {"query_key_value.weight": ("matrix", {"split": (8, 8, 8)})},
    ),
    "Falcon": (
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
        | dict(new_decoder_architecture=True, num_kv_heads=2),
        {"query_key_value.weight": ("matrix", {"split": (16, 8, 8)})},
    ),
    "Mixtral": (
        SMALL | dict(num_local_experts=4),
        {
            "mlp.gate.weight": ("router", {"zero_mean": True}),
            "experts.gate_up_proj": ("matrix", {"split": 2}),
            "experts.down_proj": ("matrix", {}),
        },
    ),
    "GptOss": (
        SMALL | dict(num_local_experts=4),
        {
            "mlp.router.weight": ("router", {"zero_mean": True}),
            "experts.gate_up_proj": ("matrix", {"split": (1, 1), "transposed": True}),
            "experts.down_proj": ("matrix", {"transposed": True}),
        },
    ),
    "Qwen3Next": (
        SMALL
        | ROUTED
        | dict(linear_num_value_heads=4, linear_num_key_heads=2)
        | dict(linear_key_head_dim=8, linear_value_head_dim=8)
        | dict(layer_types=["linear_attention", "full_attention"]),
        {
            "in_proj_qkvz.weight": ("matrix", {"split": (8, 8, 16, 16)}),
            "in_proj_ba.weight": ("matrix", {"split": (2, 2)}),
            "q_proj.weight": ("matrix", {"split": (8, 8)}),
            "conv1d.weight": ("vector", {}),
            "mlp.gate.weight": ("router", {"zero_mean": True}),
            "shared_expert_gate.weight": ("vector", {}),
        },
    ),
    "DeepseekV3": (
        SMALL
        | dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
        | dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
        | dict(v_head_dim=6, first_k_dense_replace=1),
        {
            "mlp.gate.weight": ("router", {}),  # of sigmoids
            "kv_b_proj.weight": ("matrix", {"split": (8, 6)}),
            "kv_a_proj_with_mqa.weight": ("matrix", {"split": (16, 4)}),
        },
    ),
    "Mamba": (
        dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8, time_step_rank=4),
        {
            "in_proj.weight": ("matrix", {"split": 2}),
            "x_proj.weight": ("matrix", {"split": (4, 8, 8)}),
            "conv1d.weight": ("vector", {}),
            "A_log": ("vector", {}),
        },
    ),
    "XLNet": (
        dict(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=64),
        {"rel_attn.q": ("matrix", {"flatten": True}), "seg_embed": ("embedding", {})},
    ),
}


@FULL
@pytest.mark.parametrize("family", MODELS)
def test_models_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    settings, wanted = MODELS[family]
    ending = {"GPT2": "LMHeadModel", "XLNet": "LMHeadModel"}.get(family, "ForCausalLM")
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


class GPTNeoXAttention(nn.Module):
    """As transformers', whose class users and FSDP2 derive others from."""

    head_size = 4

    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(8, 24)


class FSDPGPTNeoXAttention(GPTNeoXAttention):
    pass


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._checkpoint_wrapped_module = module


@pytest.mark.parametrize("kind", [GPTNeoXAttention, FSDPGPTNeoXAttention])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_class_of_its_own_and_a_wrapper_hide_no_cut(kind, wrapped):
    model = nn.ModuleDict({"attn": kind()})
    if wrapped:
        model["attn"].query_key_value = Wrapper(model["attn"].query_key_value)
    name, parameter = next(each for each in model.named_parameters() if each[1].ndim == 2)
    assert cut_of(name, parameter, dict(model.named_modules())) == {"split": (4, 4, 4)}
    assert looks_fused(name)


@pytest.mark.parametrize("kind,gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_the_gates_of_torchs_recurrent_layers_are_matrices_of_their_own(kind, gates):
    model = nn.ModuleDict({"rnn": kind(6, 5)})
    for name in ("rnn.weight_ih_l0", "rnn.weight_hh_l0"):
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
