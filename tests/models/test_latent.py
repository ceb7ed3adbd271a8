"""The DeepSeek family: published sizes, groups of experts, costs. tests/exchange has its logits."""

import dataclasses

import pytest
import torch

from tests.models.test_logits import Sizes
from torchmars.config import model_config
from torchmars.config.deepseek import DeepseekArgs
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.models.deepseek import Deepseek
from torchmars.models.initialize import init_weights
from torchmars.models.moe import Router
from torchmars.optim.roles import roles

ARGS = DeepseekArgs(
    n_layer=3,
    n_head=4,
    n_embd=32,
    n_inner=96,
    vocab_size=64,
    seq_len=24,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_expert=8,
    n_expert_used=3,
    n_expert_inner=24,
    n_expert_shared=2,
    n_dense=1,
    n_group=4,
    topk_group=2,
    routed_scaling=2.5,
    router="sigmoid",
)
DENSE = {"n_expert": 0, "n_dense": 0, "n_expert_shared": 0, "routed_scaling": 1.0}
DENSE |= {"n_group": 1, "topk_group": 1, "router": "softmax"}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_len": 16}
VARIANTS = {
    "deepseek": {},
    "deepseek without latents of queries": {"q_lora_rank": 0, "tied": True},
    "deepseek of halves": {"rope_interleave": False, "n_group": 1, "topk_group": 1},
    "deepseek dense": DENSE,
    "deepseek stretched": YARN | {"rope_attention_factor": 1.0, "rope_logit_factor": 1.0},
    "deepseek stretched otherwise": YARN | {"rope_beta_fast": 1.0, "rope_logit_factor": 0.7},
}


@pytest.mark.parametrize(
    "size,vocabulary,parameters,active",
    [
        ("moonlight-16b-a3b", 163840, 15_960_108_544, 2_579_230_208),
        ("glm-4.7-flash", 154880, 29_943_390_976, 3_579_568_896),
        ("deepseek-v3", 129280, 671_026_404_352, 36_625_603_584),
        ("kimi-k2", 163840, 1_026_408_209_408, 31_687_072_768),
    ],
)
def test_published_sizes(size, vocabulary, parameters, active):
    """Published counts of active parameters are without the token table."""
    model = build_meta_model(model_config(name="deepseek", size=size), vocabulary, 4096)
    assert model.parameter_count == parameters
    assert model.active_count - vocabulary * model.width == active


def test_the_size_for_cpus_is_small():
    model = build_meta_model(model_config(name="deepseek"), 256, 128)
    assert 3e6 < model.parameter_count < 6e6 and model.active_count < model.parameter_count


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"qk_rope_head_dim": 7}, "model.qk_rope_head_dim = 7 cannot be rotated"),
        ({"n_group": 8}, "model.n_group = 8 needs two experts or more in each group"),
        ({"router": "softmax"}, "model.n_group = 4 has no meaning with a softmax router"),
        ({"topk_group": 1}, "leaves 2 experts, fewer than model.n_expert_used = 3: raise it"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ARGS, **changes).check()


def test_a_group_that_is_left_out_gives_no_expert_however_low_the_others_are():
    """Its experts have -inf and not 0, which is more than a score with a negative bias."""
    router = Router(8, 6, 2, True, sigmoid=True, groups=(3, 1))
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, 0, 0.5, generator)
    router.bias.copy_(torch.tensor([-2.0, -3, -2, -3, -2, -3]))
    x = torch.randn(40, 8, generator=generator)
    scores = (x @ router.weight.T).sigmoid() + router.bias
    best = scores.unflatten(1, (3, 2)).sum(dim=2).argmax(dim=1)
    chosen = router(x)[1].sort(dim=1).values
    assert torch.equal(chosen, torch.stack([2 * best, 2 * best + 1], dim=1))
    assert len(best.unique()) == 3


def test_flops_count_attention_by_its_own_widths():
    """6 for each weight that a token uses in a product, and 6 T H (N + R + V) for each block."""
    model = build_meta_model(model_config(name="deepseek", size="deepseek-v3"), 129280, 4096)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    products = 36_625_603_584 - norms
    assert model.flops_per_token() == 6 * products + 6 * 4096 * 61 * 128 * (128 + 64 + 128)
    assert model.kept_width == 576


def test_roles_and_initial_weights():
    model = Deepseek(ARGS)
    init_weights(model, seed=5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all() and roles(model)[name] == "vector", name
        elif ".attn." in name:
            std = 0.02 / 6**0.5 if name.endswith("proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert roles(model)[name] == "matrix", name


def test_no_tensor_has_all_logits_of_attention():
    """torch falls to a kernel that makes them without a word, where values are narrower than keys:
    they are padded."""
    length, heads = 1024, 4
    args = dataclasses.replace(ARGS, n_layer=1, n_head=heads, **DENSE, seq_len=length)
    model = Deepseek(args)
    init_weights(model, seed=0)
    with Sizes() as sizes:
        model(torch.zeros(1, length, dtype=torch.int64)).sum().backward()
    assert length * max(args.n_inner, heads * 24) <= sizes.largest < heads * length**2 / 8
