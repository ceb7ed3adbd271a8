"""A model beside its base: what [transfer] makes of it, in the forward pass and at the start."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmars.comparison.coordinates import based, sized
from torchmars.config.load import validate
from torchmars.config.model import MODELS as MODEL_CLASSES
from torchmars.config.model_args import Multipliers
from torchmars.config.optimizer import optimizer_section
from torchmars.core.errors import UserError
from torchmars.exchange.export import folded
from torchmars.models import build_run_model
from torchmars.models.base import factors_of
from torchmars.models.cache import Cache
from torchmars.models.initialize import init_weights
from torchmars.optim.rules import RULES
from torchmars.training.optimizer import build_optimizer

LLAMA = {"name": "llama", "size": "nano", "n_embd": 32, "n_head": 2, "n_kv_head": 1, "n_inner": 96}
MODELS = {
    "gpt2": {"name": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "bias": True},
    "llama": LLAMA | {"n_layer": 2, "tied": False},
    "moe": LLAMA | {"size": "glm-nano", "n_layer": 2, "head_dim": 16, "n_expert_inner": 32},
    "qk_norm": LLAMA | {"n_layer": 2, "qk_norm": True},
    "plain": {"name": "plain", "size": "tiny"},
}


@pytest.fixture(autouse=True)
def plugin(own_family):
    return own_family


def config(name, transfer=None, **tables):
    own = {"model": MODELS[name], "transfer": transfer or {}, "training": {"seq_len": 16}}
    return validate([("in a test", own | tables)])


def model_of(config):
    """Return the model of a config with its initial weights, on the CPU."""
    model = build_run_model(config, 64).to_empty(device="cpu")
    factors = factors_of(model, config.transfer)
    init_weights(model, 0, None, factors and factors.std)
    return model


class Products(TorchDispatchMode):
    """Counts products with a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        number = len(args) > 1 and not isinstance(args[1], torch.Tensor)
        self.count += function.overloadpacket is torch.ops.aten.mul and number
        return function(*args, **(kwargs or {}))


def products(model):
    with Products() as products:
        model.head(model(torch.arange(16)[None]))
    return products.count


@pytest.mark.parametrize("name", MODELS)
def test_the_base_of_ones_own_shape_changes_no_bit_and_multiplies_nothing(name):
    plain = config(name)
    same = based(plain, plain)
    assert same.transfer.named
    ours, before = model_of(same), model_of(plain)
    assert ours.args.multipliers == Multipliers(1, 1, 1)
    assert products(ours) == products(before)
    for (key, one), (_, other) in zip(ours.state_dict().items(), before.state_dict().items()):
        assert torch.equal(one, other), key
    for rule in RULES:
        optimizer = replace(plain, optimizer=optimizer_section(rule)()).resolve().optimizer
        pairs = [
            (replace(same, optimizer=optimizer), ours),
            (replace(plain, optimizer=optimizer), before),
        ]
        groups = [build_optimizer(*each).param_groups for each in pairs]
        one, other = ([{**group, "params": None} for group in each] for each in groups)
        assert one == other


@pytest.mark.parametrize("name", MODELS)
def test_each_place_is_multiplied_once(name):
    """Against the same weights without multipliers, and hooks that multiply in their place."""
    base = config(name, {"n_layer": 2, "depth": "1/L"})
    grown = sized(base, 3 * build_run_model(base, 64).width, 10)
    ours = model_of(based(grown, base))
    assert ours.args.multipliers == Multipliers(pytest.approx(1 / 3), 0.2, 1)
    plain = model_of(replace(grown, transfer=config(name).transfer))
    plain.load_state_dict(ours.state_dict())
    assert products(ours) == products(plain) + 2 * 10 + 1
    for block in plain.blocks.values():
        for branch in (block.attn, block.mlp):
            branch.register_forward_hook(lambda module, inputs, output: output / 5)
    plain.norm.register_forward_hook(lambda module, inputs, output: output / 3)
    tokens = torch.randint(64, (2, 16))
    expected = plain.head(plain(tokens))
    torch.testing.assert_close(ours.head(ours(tokens)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qk_norm", "plain"])
def test_wider_heads_divide_attention_logits_by_their_width(name):
    base = config(name)
    heads = {"n_head": 1} | ({"n_kv_head": 1} if base.model.name == "llama" else {})
    wide = replace(base, model=replace(base.model, **heads))
    ours, plain = model_of(based(wide, base)), model_of(wide)
    ratio = plain.head_width / (plain.width // 2 if name != "plain" else 8)
    assert ours.args.multipliers == Multipliers(1, 1, pytest.approx(ratio**-0.5))
    for block in plain.blocks.values():
        block.attn.attend.register_forward_pre_hook(
            lambda module, inputs: (inputs[0] * ratio**-0.5, *inputs[1:])
        )
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(ours(tokens), plain(tokens), rtol=1e-5, atol=1e-6)


def test_initial_values_have_the_root_of_the_inputs_and_count_depth_once():
    base = config("gpt2")
    for depth, of_proj in (("none", (3 * 5) ** -0.5), ("1/L", 3**-0.5), ("1/sqrt(L)", 3**-0.5)):
        grown = sized(config("gpt2", transfer={"n_layer": 2, "depth": depth}), 96, 10)
        ours, first = model_of(based(grown, base)), model_of(base)
        for name, ratio in (("attn.qkv", 3**-0.5), ("attn.proj", of_proj), ("mlp.proj", of_proj)):
            now, was = (
                each.get_parameter(f"blocks.1.{name}.weight").detach().std()
                for each in (ours, first)
            )
            assert float(now / was) == pytest.approx(ratio, rel=0.06), (depth, name)
        assert float(ours.tok_embed.weight.detach().std()) == pytest.approx(0.02, rel=0.03)


def test_a_size_is_taken_as_a_shape_and_no_more():
    section = {"size": "nano", "n_layer": 1}
    large = config("llama", section, model={"name": "llama", "size": "160m"})
    factors = factors_of(
        build_run_model(large, 64), large.transfer
    )  # nano's head is tied: not here
    twin = factors.twins["output.weight"]
    assert (twin.base.shape, factors.layers) == ((64, 256), 12)
    assert factors.twins["blocks.11.mlp.proj.weight"].base.shape == (256, 704)
    assert factors.multipliers["attention"] == 1


def test_a_plugins_own_settings_name_its_base():
    large = config("plain", {"width": 16, "n_head": 2, "mlp_ratio": 4}, training={"seq_len": 8})
    factors = factors_of(build_run_model(large, 64), large.transfer)
    assert factors.multipliers == {"logits": 0.5, "residual": 1, "attention": 1}
    assert factors.twins["blocks.0.mlp.proj.weight"].base.shape == (16, 64)


def test_mistakes_are_refused_in_one_line():
    def refused(name, section, **tables):
        with pytest.raises(UserError) as error:
            build_run_model(config(name, section, **tables), 64)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused("gpt2", {"depth": "1/L"}).startswith("transfer.depth has no meaning without")
    assert "unknown key transfer.n_inner" in refused("gpt2", {"n_inner": 64})
    assert 'transfer.size = "8b" is none of the sizes nano' in refused("gpt2", {"size": "8b"})
    assert "its base cannot be built: model.n_embd = 33" in refused("gpt2", {"n_embd": 33})
    assert "tied" in refused("llama", {"tied": True})
    assert "rope_theta" in refused("llama", {"rope_theta": 10.0})
    assert "n_expert = 4, where model.n_expert = 0: both must" in refused("llama", {"n_expert": 4})
    assert "n_expert = 8, where model.n_expert = 0" in refused("llama", {"size": "moe-nano"})
    assert "model.router = sigmoid has no meaning without experts" in refused(
        "moe", {"n_expert": 0}
    )


def test_a_family_that_applies_no_multiplier_is_refused_but_for_its_own_shape(plugin, monkeypatch):
    monkeypatch.setattr(plugin.Plain, "multipliers", ("logits",))
    deep = sized(config("plain"), depth=4)
    build_run_model(based(deep, config("plain")), 64)  # "none": all are 1
    section = {"n_layer": 2, "depth": "1/L"}
    message = "(Plain|Other) does not say that it applies the multiplier 'residual', here 0.5"
    with pytest.raises(UserError, match=message):
        build_run_model(replace(deep, transfer=config("plain", section).transfer), 64)
    # So is a class that has the blocks of another, or its own, and does not say so.
    monkeypatch.undo()
    monkeypatch.setitem(MODEL_CLASSES, "plain", "own_family.Other")
    monkeypatch.setattr(plugin, "Other", type("Other", (plugin.Plain,), {}), raising=False)
    with pytest.raises(UserError, match=message):
        build_run_model(replace(deep, transfer=config("plain", section).transfer), 64)


@pytest.mark.parametrize("name", ["gpt2", "llama", "moe", "qk_norm"])
def test_folded_weights_compute_the_same_without_multipliers(name):
    base = config(name, {"n_layer": 2, "depth": "1/L"})
    if name != "gpt2":
        base = replace(base, model=replace(base.model, head_dim=16))
    heads = {"n_head": 2} | ({} if name == "gpt2" else {"n_kv_head": 2, "head_dim": 48})
    grown = sized(base, 96, 4)  # heads 3 times as wide as the base's: all multipliers are others
    ours = model_of(based(replace(grown, model=replace(grown.model, **heads)), base))
    assert all(value < 1 for value in ours.args.multipliers)
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():  # biases and gains too
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    plain = type(ours)(replace(ours.args, multipliers=Multipliers()))
    weights = ours.state_dict().items()
    plain.load_state_dict({key: folded(ours, key, each.clone()) for key, each in weights})
    ours, plain = ours.double(), plain.double()  # what is left is the rounding of folded weights
    tokens = torch.randint(64, (2, 16), generator=generator)
    expected = ours.head(ours(tokens))
    apart = (plain.head(plain(tokens)) - expected).abs().max() / expected.abs().max()
    assert apart < 4e-7
    other = type(ours)(replace(ours.args, multipliers=Multipliers())).double()
    other.load_state_dict(ours.state_dict())
    assert (other.head(other(tokens)) - expected).abs().max() / expected.abs().max() > 0.1


def test_a_family_that_says_nothing_of_folding_is_not_exported():
    deep = sized(config("plain"), depth=4)
    model = model_of(based(deep, config("plain", {"n_layer": 2, "depth": "1/L"})))
    assert model.args.multipliers == Multipliers()
    assert folded(model, "norm.weight", torch.ones(2)).tolist() == [1, 1]
    section = config("plain", {"n_layer": 2, "depth": "1/L"}).transfer
    with pytest.raises(UserError, match=r"residual 0.5, attention 1\) cannot be exported without"):
        folded(model_of(replace(deep, transfer=section)), "norm.weight", torch.ones(2))


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_logits_of_a_pass_without(name):
    base = config(name, {"n_layer": 2, "depth": "1/L"})
    model = model_of(based(sized(base, 96, 4), base)).eval()
    plain, context = copy.deepcopy(model), [5, 9, 2, 7]
    cache = Cache(model, 16)
    found = [cache.start([context])[0], cache.go_on([3])[0]]
    for length, logits in zip((4, 5), found):
        with torch.no_grad():
            expected = plain.head(plain(torch.tensor([[*context, 3][:length]])))[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
