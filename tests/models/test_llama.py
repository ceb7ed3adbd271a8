"""The Llama family's published sizes, roles and positions. tests/exchange has its logits."""

import dataclasses

import pytest
import torch

from tests.support.ranks import run_ranks
from torchmars.config import (
    ActivationCheckpointConfig,
    Degrees,
    ParallelismConfig,
    TrainingConfig,
    model_config,
)
from torchmars.config.llama import SIZES, LlamaArgs
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama
from torchmars.models.rotary import rotate, rotation
from torchmars.optim.roles import roles
from torchmars.parallel.layout import Layout
from torchmars.parallel.loss import token_losses
from torchmars.parallel.parallel_model import parallelize
from torchmars.parallel.part import ModelPart

ARGS = LlamaArgs(
    n_layer=3,
    n_head=4,
    n_kv_head=2,
    n_embd=64,
    n_inner=96,
    vocab_size=64,
    seq_len=24,
    rope_theta=500_000.0,
)
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_len": 16}
OLMO = {"qk_norm": True, "qk_norm_whole": True, "post_norms": True, "rope_theta": 5e5}
OLMO |= {"window": 5, "window_blocks": "sf"}
VARIANTS = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama scaled": {"rope_scaling_factor": 8.0},
    "llama one head each": {"n_kv_head": 4},
    "llama linear": {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "llama yarn": YARN,
    "llama yarn, slow": YARN | {"rope_beta_fast": 3.0, "rope_attention_factor": 0.7},
    "mistral": {"window": 5},
    "ministral": {"window": 5, "window_blocks": "sf"},
    "smollm3": {"rope_blocks": "rn", "tied": True},
    "smollm3 windows": {"rope_blocks": "rn", "window": 5, "window_blocks": "fs"},
    "olmo3": OLMO,
    "olmo3 yarn": OLMO | YARN | {"rope_blocks": "ur"},
    "qwen2 windows": {"qkv_bias": True, "window": 7, "window_blocks": "fs"},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "head_dim": 32, "norm_eps": 1e-6, "rope_theta": 1e6, "tied": True},
}


def model_of(args, seed=0):
    """A model of random weights, biases and norms."""
    model = Llama(args)
    generator = torch.Generator().manual_seed(seed)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        torch.nn.init.normal_(value, float("norm" in name), 0.1, generator)
    return model


@pytest.mark.parametrize(
    "size,vocabulary,parameters",
    [
        ("160m", 50257, 159_861_504),
        ("1b", 128256, 1_235_814_400),
        ("3b", 128256, 3_212_749_824),
        ("8b", 128256, 8_030_261_248),
        ("70b", 128256, 70_553_706_496),
        ("405b", 128256, 405_853_388_800),
        ("mistral-7b-v0.1", 32000, 7_241_732_096),
        ("mistral-7b-v0.3", 32768, 7_248_023_552),
        ("mistral-nemo", 131072, 12_247_782_400),
        ("mistral-small-24b", 131072, 23_572_403_200),
        ("ministral-8b", 131072, 8_019_808_256),
        ("smollm3-3b", 128256, 3_075_098_624),
        ("olmo3-7b", 100288, 7_298_011_136 + 2 * 10 * 4096),  # 10 rows more than published
        ("olmo3-32b", 100288, 32_233_522_176 + 2 * 10 * 5120),
        ("qwen3-0.6b", 151936, 596_049_920),
        ("qwen3-1.7b", 151936, 1_720_574_976),
        ("qwen3-4b", 151936, 4_022_468_096),
        ("qwen3-8b", 151936, 8_190_735_360),
        ("qwen3-14b", 151936, 14_768_307_200),
        ("qwen3-32b", 151936, 32_762_123_264),
    ],
)
def test_published_sizes(size, vocabulary, parameters):
    model = build_meta_model(model_config(name="llama", size=size), vocabulary, 8192)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.args.qk_norm == size.startswith(("qwen3", "olmo3"))
    if vocabulary == 128256 and size != "smollm3-3b":
        assert model.args.rope_scaling_factor == (32 if model.args.tied else 8)


def test_fields_take_the_place_of_the_named_size():
    config = model_config(name="llama", size="qwen3-8b", n_layer=1, qk_norm=False, vocab_size=100)
    model = build_meta_model(config, 50257, 32)
    expected = SIZES["qwen3-8b"] | {
        "n_layer": 1,
        "qk_norm": False,
        "vocab_size": 100,
        "seq_len": 32,
    }
    assert model.args == LlamaArgs(**expected)


@pytest.mark.parametrize(
    "fields,message",
    [
        (
            {"size": "7b"},
            '"7b" is no size of model.name = "llama": did you mean qwen3-1.7b? It has nano, ',
        ),
        (
            {"name": "gpt2", "size": "8b"},
            '"8b" is no size of model.name = "gpt2": it has nano, small, medium, large, xl$',
        ),
        ({"n_head": 3, "n_kv_head": 1}, "n_embd = 256 does not divide into model.n_head = 3"),
        ({"head_dim": 33}, "heads of width 33 cannot be rotated"),
    ],
)
def test_shapes_that_cannot_be_built(fields, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        build_meta_model(model_config(**{"name": "llama"} | fields), 256, 32)


def test_initial_weights():
    model = Llama(dataclasses.replace(ARGS, qkv_bias=True, qk_norm=True))
    init_weights(model, seed=5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            std = 0.02 / 6**0.5 if name.endswith("proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize("tied", [False, True])
def test_roles(tied):
    args = dataclasses.replace(ARGS, qkv_bias=True, qk_norm=True, tied=tied)
    for name, role in roles(Llama(args)).items():
        if name in ("tok_embed.weight", "output.weight"):
            assert role == ("embedding" if name == "tok_embed.weight" else "head")
        else:
            is_vector = "norm" in name or name.endswith("bias")
            assert role == ("vector" if is_vector else "matrix"), name


def test_the_turn_of_a_bfloat16_head_is_rounded_once():
    heads = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = rotation(torch.arange(24), 16, ARGS)
    exact = rotate(heads.double(), cos.double(), sin.double()).float()
    turned = rotate(heads, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), exact, rtol=2**-8, atol=1e-6)
    rounded = rotate(heads, cos.bfloat16(), sin.bfloat16()).float()
    assert ((rounded - exact).abs() > 2**-8 * exact.abs() + 1e-6).any()


def losses_under_mixed_precision(windows):
    """Return the losses of the sharded model in bfloat16."""
    layout = Layout.create(torch.device("cpu"), Degrees(dp_shard=2))
    training, kept = TrainingConfig(dtype="bfloat16"), ActivationCheckpointConfig()
    part = ModelPart(model_of(ARGS), True, True, layout, training)
    parallelize(part, layout, ParallelismConfig(), training, kept)
    return part(windows[:, :-1], windows[:, 1:], wanted="losses")


def test_mixed_precision_leaves_rotary_positions_exact():
    windows = torch.randint(64, (2, 25), generator=torch.Generator().manual_seed(0))
    plain = model_of(ARGS).bfloat16()
    hidden = plain(windows[:, :-1])
    sharded, _ = run_ranks(losses_under_mixed_precision, 2, windows)
    expected = plain.head(hidden, lambda *of: token_losses(*of, windows[:, 1:], chunk=64))
    assert torch.equal(sharded, expected)
