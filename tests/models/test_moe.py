"""Mixtures of experts against loops over tokens; their published sizes."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.models.test_llama import ARGS, model_of
from tests.support.full import full_but
from torchmars.config import model_config
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.models.grouped import grouped_mm
from torchmars.models.moe import MoE, Router
from torchmars.optim import param_groups
from torchmars.optim.roles import roles

EXPERTS = {"n_expert": 8, "n_expert_used": 2, "n_expert_inner": 48}
LLAMA_OF = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 96}
# As GLM-4.5-Air.
GLM = {
    "router": "sigmoid",
    "n_expert_shared": 1,
    "n_dense": 1,
    "rotary_fraction": 0.5,
    "qkv_bias": True,
}
VARIANTS = {
    "qwen3-moe": EXPERTS | {"qk_norm": True, "head_dim": 32, "tied": True},
    "qwen3-moe not normalised": EXPERTS
    | {"qk_norm": True, "n_expert": 9, "n_expert_used": 3, "norm_topk_prob": False},
    "mixtral": EXPERTS | {"n_expert_inner": 0},
    "glm": EXPERTS | GLM,
    "glm with norms": EXPERTS
    | GLM
    | {"n_dense": 2, "n_expert_shared": 2, "qk_norm": True, "tied": True, "routed_scaling": 2.5},
    "glm not normalised": EXPERTS
    | GLM
    | {"n_dense": 0, "qkv_bias": False, "norm_topk_prob": False, "routed_scaling": 0.7},
}


def moe(tokens, experts, used, inner=12, width=8):
    """An MoE in float64 and `tokens` for it, with gradients."""
    generator = torch.Generator().manual_seed(tokens)
    layer = MoE(width, experts, used, inner, normalize=True).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, generator)
    x = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
    return layer, x.requires_grad_()


def by_loop(layer, x):
    """What each token's experts give, token by token."""
    experts = layer.experts
    weights, chosen = layer.router(x.flatten(0, 1))
    tokens = []
    for token, scales, numbers in zip(x[0], weights, chosen.tolist(), strict=True):
        parts = [
            scale * (experts.proj[n] @ (F.silu(experts.gate[n] @ token) * (experts.up[n] @ token)))
            for scale, n in zip(scales, numbers, strict=True)
        ]
        tokens.append(sum(parts))
    return torch.stack(tokens).unsqueeze(0)


# The last two leave experts without tokens, and have sizes that torch's grouped_mm cannot take.
@pytest.mark.parametrize(
    "tokens,experts,used,inner", [(33, 4, 2, 12), (20, 5, 3, 12), (1, 8, 2, 12), (3, 8, 1, 7)]
)
def test_outputs_and_gradients_equal_a_loop_over_tokens(tokens, experts, used, inner):
    layer, x = moe(tokens, experts, used, inner)
    values = {**dict(layer.named_parameters()), "x": x}
    results = [layer(x), by_loop(layer, x)]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)  # the router's weights are float32
    first, second = (
        torch.autograd.grad(each.square().sum(), list(values.values())) for each in results
    )
    for name, ours, looped in zip(values, first, second, strict=True):
        torch.testing.assert_close(ours, looped, rtol=1e-5, atol=1e-6, msg=name)
    chosen = layer.router(x.flatten(0, 1))[1]
    counts = layer.counts(chosen)
    assert counts.sum() == tokens * used
    for number in (counts == 0).nonzero().flatten():
        assert not first[1][number].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [16, 7])
def test_grouped_products_are_those_of_each_group(dtype, inner):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 8, dtype=dtype, generator=generator)
    weights = torch.randn(4, inner, 8, dtype=dtype, generator=generator).requires_grad_()
    ends = torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    result = grouped_mm(rows, weights, ends)
    parts = [
        rows[:3] @ weights[0].T,
        rows[:0] @ weights[1].T,
        rows[3:9] @ weights[2].T,
        rows[9:] @ weights[3].T,
    ]
    torch.testing.assert_close(result, torch.cat(parts))
    # The gradient of a sum is expanded: torch's grouped_mm takes no such strides.
    ours, theirs = (
        torch.autograd.grad(each.sum(), weights)[0] for each in (result, torch.cat(parts))
    )
    torch.testing.assert_close(ours, theirs)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.torchmars.grouped_mm, (rows, weights, ends), test_utils=checks)


@pytest.mark.parametrize("kind", full_but(["glm"], ["glm", "mixtral"]))
def test_blocks_compile_as_one_graph(kind):
    plain, compiled = (model_of(dataclasses.replace(ARGS, **VARIANTS[kind])) for _ in range(2))
    for block in compiled.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    tokens = torch.randint(64, (2, 24))
    for model in (plain, compiled):
        model(tokens).square().sum().backward()
    for ours, theirs in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


# In billions, as published, without the token table among the active ones.
@pytest.mark.parametrize(
    "size,vocab_size,total,active",
    [
        ("qwen3-30b-a3b", 151936, 30.53, 3.04),
        ("qwen3-235b-a22b", 151936, 235.09, 21.57),
        ("mixtral-8x7b", 32000, 46.70, 12.75),
        ("mixtral-8x22b", 32768, 140.63, 38.96),
        ("glm-4.5-air", 151552, 106.85, 12.80),
        ("glm-4.5", 151552, 352.80, 32.86),
    ],
)
def test_published_sizes(size, vocab_size, total, active):
    config = model_config(name="llama", size=size, vocab_size=vocab_size)
    model = build_meta_model(config, vocab_size, 1024)
    assert round(model.parameter_count / 1e9, 2) == total
    used = model.active_count - model.tok_embed.weight.numel()
    assert round(used / 1e9, 2) == active


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"n_expert": 4, "n_expert_used": 5},
            r"used = 5 is more than model\.n_expert = 4",
        ),
        (EXPERTS | {"n_dense": 3}, r"n_dense = 3 leaves no block of model\.n_layer = 3"),
        ({"n_expert_shared": 1}, "n_expert_shared = 1 has no meaning without experts: set it to 0"),
        (GLM, "n_dense = 1, model.router = sigmoid has no meaning .* set it to 0, 0, softmax, or"),
        ({"rotary_fraction": 0.3}, "rotary_fraction = 0.3 of heads of width 16 is no even number"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ARGS, **changes).check()


def test_a_bias_chooses_and_does_not_weigh():
    router = Router(8, 6, 2, normalize=True, sigmoid=True, scale=2.5).double()
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, 0, 0.5, generator)
    x = torch.randn(40, 8, dtype=torch.float64, generator=generator)
    scores = (x.float() @ router.weight.float().T).sigmoid()
    assert set(router(x)[1].flatten().tolist()) == set(range(6))
    router.bias.copy_(torch.tensor([1.0, 0, -1, 0, 1, 0]))  # more than any score
    weights, chosen = router(x)
    assert set(map(frozenset, chosen.tolist())) == {frozenset({0, 4})}
    both = scores[:, [0, 4]]
    expected = 2.5 * both / both.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights.gather(1, chosen.argsort(dim=1)), expected)
    assert weights.dtype == torch.float32
    torch.nn.init.constant_(router.weight, -100)
    assert not router(torch.ones(1, 8))[0].any()  # all scores are 0, and so is their sum


def test_routers_have_a_role_and_take_the_matrices_rule():
    model = model_of(dataclasses.replace(ARGS, **EXPERTS))
    [group] = [each for each in param_groups(model, "mars-m") if each["role"] == "router"]
    assert [name for name, _ in group["params"]] == [
        f"blocks.{number}.mlp.router.weight" for number in range(3)
    ]
    assert group["rule"] == "mars-m" and roles(model)["blocks.0.mlp.experts.gate"] == "matrix"


def test_counts_in_words_name_the_active_parameters_where_they_differ():
    dense, mixture = model_of(ARGS), model_of(dataclasses.replace(ARGS, **EXPERTS))
    assert dense.counts_in_words == f"{dense.parameter_count:,} parameters"
    stacks = sum(each.numel() for each in mixture.parameters() if each.ndim == 3)
    active = mixture.parameter_count - stacks * 3 // 4
    assert mixture.counts_in_words.endswith(f" parameters ({active:,} active)")


def test_only_a_softmax_router_is_without_its_mean():
    """A sigmoid's gradient has one. All matrices of our models stay whole otherwise."""
    for router, wanted in (("softmax", True), ("sigmoid", None)):
        args = dict(LLAMA_OF, **EXPERTS, router=router)
        model = build_meta_model(model_config(name="llama", **args), 64, 32)
        [group] = [each for each in param_groups(model, "mars-m") if each["role"] == "router"]
        assert group.get("zero_mean") is wanted


def test_one_expert_with_its_probability_divided_out_has_exactly_no_gradient():
    """Of the quotient's rounding an orthogonalisation would make a step."""
    for sigmoid in (False, True):
        router = Router(16, 4, 1, True, sigmoid, scale=2.5)
        torch.nn.init.normal_(router.weight)
        weights, _ = router(torch.randn(64, 16))
        (weights * torch.randn(64, 1)).sum().backward()
        assert (weights == 2.5).all() and not router.weight.grad.any()
