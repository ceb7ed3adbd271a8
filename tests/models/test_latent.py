"""The DeepSeek family against transformers' DeepSeek-V3 and GLM-4.7-Flash, and published sizes."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchmars.config import ModelConfig
from torchmars.config.deepseek import DeepseekArgs
from torchmars.core.errors import UserError
from torchmars.exchange.from_config import from_config
from torchmars.exchange.names import counterparts
from torchmars.models import build_meta_model, build_model
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
# The sheet of transformers' tiny models: their class, and what is not as in the others.
PLAIN = {"rope_type": "default", "rope_theta": 5e4}
YARN_THERE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
YARN_THERE |= {"rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0}
THEIRS = {
    "groups": (
        "DeepseekV3",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"rope_parameters": YARN_THERE | {"mscale": 1.0}},
    ),
    "other mscales": (
        "DeepseekV3",
        {"n_group": 1, "topk_group": 1}
        | {"rope_parameters": YARN_THERE | {"mscale": 0.7, "beta_fast": 1.0}},
    ),
    "linear": (
        "DeepseekV3",
        {"n_group": 1, "topk_group": 1} | {"rope_parameters": YARN_THERE | {"rope_type": "linear"}},
    ),
    "no q_lora": ("DeepseekV3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "halves": ("DeepseekV3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "weights as they are": ("DeepseekV3", {"norm_topk_prob": False, "n_group": 2, "topk_group": 1}),
    "GLM-4.7-Flash stretched": ("Glm4MoeLite", {"rope_parameters": YARN_THERE}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}),
}


def model_of(kind, changes):
    """A tiny model of transformers, none of whose values is at rest."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        **dict(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            rms_norm_eps=1e-5,
            rope_parameters=PLAIN,
        )
        | ({"first_k_dense_replace": 1} if kind == "DeepseekV3" else {})
        | changes
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "correction" in name:  # of both signs
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
            elif "inv_freq" not in name:
                rest, size = float("norm" in name), 0.2 if value.ndim == 1 else 0.1
                value.copy_(rest + size * torch.randn(value.shape, generator=generator))
    return model.eval()


def ours_of(other):
    """Our model of a config of transformers, and which part of which of its tensors each is."""
    table = from_config(other.config.to_dict())
    length = table.pop("seq_len")
    model = build_model(ModelConfig(**table), 1, length).eval()
    places = counterparts(model, fused=True)

    def part(name, values):
        whole, half = values[places[name].name], places[name].half
        return whole if half is None else whole.chunk(2, dim=1)[half]

    theirs = dict(other.named_parameters()) | dict(other.named_buffers())
    assert {each.name for each in places.values()} == {
        name for name in theirs if "inv_freq" not in name
    }
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(part(name, theirs))
    return model, part


@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_equal_transformers(name):
    other = model_of(*THEIRS[name])
    model, part = ours_of(other)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(96, (2, 48), generator=generator)
    ours, theirs = model.head(model(tokens)), other(tokens, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    weights = torch.randn(ours.shape, generator=generator)
    (ours * weights).mean().backward()
    (theirs * weights).mean().backward()
    gradients = {name: each.grad for name, each in other.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = part(name, gradients)
        assert (parameter.grad - expected).abs().max() < 1e-5 * expected.abs().max(), name


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
    model = build_meta_model(ModelConfig(name="deepseek", size=size), vocabulary, 4096)
    assert model.parameter_count == parameters
    assert model.active_count - vocabulary * model.width == active


def test_the_size_for_cpus_is_small():
    model = build_meta_model(ModelConfig(name="deepseek"), 256, 128)
    assert 3e6 < model.parameter_count < 6e6 and model.active_count < model.parameter_count


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"qk_rope_head_dim": 7}, "model.qk_rope_head_dim = 7 cannot be rotated"),
        ({"n_group": 8}, "model.n_group = 8 needs two experts or more in each group"),
        ({"n_group": 3, "n_expert": 10}, "model.n_group = 3 needs two experts or more in each"),
        ({"router": "softmax"}, "model.n_group = 4 has no meaning with a softmax router"),
        ({"topk_group": 5}, "model.topk_group = 5 is more than model.n_group = 4"),
        ({"topk_group": 1}, "leaves 2 experts, fewer than model.n_expert_used = 3: raise it"),
        (
            {"n_expert": 0, "n_dense": 0},
            "model.n_expert_shared = 2, model.router = sigmoid.* no meaning without experts",
        ),
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
    model = build_meta_model(ModelConfig(name="deepseek", size="deepseek-v3"), 129280, 4096)
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


class Largest(TorchDispatchMode):
    """Records how large the largest tensor is that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return made


def test_no_tensor_has_all_logits_of_attention():
    """torch falls to a kernel that makes them without a word, where values are narrower than keys:
    they are padded."""
    length, heads = 1024, 4
    args = dataclasses.replace(ARGS, n_layer=1, n_head=heads, **DENSE, seq_len=length)
    model = Deepseek(args)
    init_weights(model, seed=0)
    with Largest() as largest:
        model(torch.zeros(1, length, dtype=torch.int64)).sum().backward()
    assert length * max(args.n_inner, heads * 24) <= largest.size < heads * length**2 / 8
