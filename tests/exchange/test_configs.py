"""Names and configs of transformers, both ways: its models with our weights, ours with its."""

import copy
import dataclasses
import json
import resource

import pytest
import torch

from tests.models.test_latent import ARGS as DEEPSEEK
from tests.models.test_latent import VARIANTS as LATENT
from tests.models.test_llama import ARGS as LLAMA
from tests.models.test_llama import VARIANTS
from tests.models.test_moe import VARIANTS as MIXTURES
from tests.support.their_models import randomised
from torchmars.config import model_config
from torchmars.config.deepseek import SIZES
from torchmars.config.gpt2 import GPT2Args
from torchmars.core.errors import UserError
from torchmars.exchange.families import FAMILIES, counterparts, from_config, to_config
from torchmars.models import build_model
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama

GPT2_SHAPE = GPT2Args(n_layer=3, n_head=4, n_embd=32, vocab_size=64, seq_len=24)
MODELS = {
    "gpt2": GPT2(GPT2_SHAPE),
    "gpt2 scaled": GPT2(dataclasses.replace(GPT2_SHAPE, scale_attn_by_inverse_layer_idx=True)),
    "openai": GPT2(dataclasses.replace(GPT2_SHAPE, bias=True, activation="gelu_tanh")),
    **{
        name: Llama(dataclasses.replace(LLAMA, **changes))
        for name, changes in (VARIANTS | MIXTURES).items()
    },
    **{
        name: Deepseek(dataclasses.replace(DEEPSEEK, **changes)) for name, changes in LATENT.items()
    },
}


def theirs_of(model, folder):
    """The model that transformers makes of our config.json, with our weights."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(to_config(model)))
    # The class of OLMo 3 has a token of padding, whose row gets no gradient.
    config = transformers.AutoConfig.from_pretrained(folder, pad_token_id=None)
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights = model.state_dict()
    state = {}
    for name, there in counterparts(model, fused=True).items():
        weight = weights[name].T if there.transposed else weights[name]
        whole = torch.cat([state[there.name], weight], dim=1) if there.half == 1 else weight
        state[there.name] = whole
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected
    with torch.no_grad():
        for name in missing:
            assert name == "lm_head.weight" or name.endswith("bias") and model.norm.bias is None
            if name.endswith("bias"):
                other.get_parameter(name).zero_()
    other.tie_weights()
    return other


@pytest.mark.parametrize("name", MODELS)
def test_their_model_of_our_config_has_our_logits_and_gradients(name, tmp_path):
    model = copy.deepcopy(randomised(MODELS[name], 0.1))
    other = theirs_of(model, tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens, positions = torch.randint(64, (2, 24), generator=generator), None
    if hasattr(model.args, "rope_scaling"):
        # Far from 0, where the angles of the long wavelengths matter.
        positions = torch.arange(9000, 9024).expand(2, 24)
    ours = model.head(model(tokens, positions))
    theirs = other(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.randn(ours.shape, generator=generator)
    (ours * weights).mean().backward()
    (theirs * weights).mean().backward()
    gradients = {name: each.grad for name, each in other.named_parameters()}
    places = counterparts(model, fused=True)
    for name, parameter in model.named_parameters():
        expected = gradients[places[name].name]
        expected = expected.T if places[name].transposed else expected
        if places[name].half is not None:
            expected = expected.chunk(2, dim=1)[places[name].half]
        assert (parameter.grad - expected).norm() < 1e-5 * expected.norm(), name


@pytest.mark.parametrize("name", MODELS)
def test_our_model_of_their_config_is_the_one_it_was(name, tmp_path):
    model = MODELS[name]
    theirs_of(model, tmp_path).config.save_pretrained(tmp_path)
    table = from_config(json.loads((tmp_path / "config.json").read_text()))
    length = table.pop("seq_len")
    with torch.device("meta"):
        again = build_model(model_config(**table), 1, length)
    args = model.args
    if isinstance(model, Llama):
        if "head_dim" in vars(args):
            args = dataclasses.replace(args, head_dim=args.head_width)
        if args.n_expert:
            inner = args.n_expert_inner or args.n_inner
            args = dataclasses.replace(args, n_expert_inner=inner)
    else:
        args = dataclasses.replace(args, bias=True)  # theirs has biases, which are 0 then
    if hasattr(args, "original_len"):  # 8192 by default
        assert again.args.original_len == args.original_len
        args = dataclasses.replace(args, rope_original_len=again.args.rope_original_len)
    assert again.args == args


KINDS = [kind for family in FAMILIES.values() for kind in family.kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_no_class_of_theirs_is_given_numbers_without_bounds(kind):
    """It would make a list of each label, and of each block."""
    plain = {"model_type": kind}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    labels = {"num_labels": 10**9, "id2label": None, "problem_type": "x"}
    assert from_config(plain | labels) == from_config(plain) and len(KINDS) == 13
    for key in ("num_hidden_layers", *(["n_layer"] if kind == "gpt2" else [])):
        with pytest.raises(UserError, match=f"its {key} is {10**12}: it must be at most 1000"):
            from_config(plain | {key: 10**12})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # a GiB


# What transformers itself declares as perhaps None.
OPTIONAL = {"n_inner", "num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters"}
READ = {
    "gpt2": "n_layer n_head n_embd n_positions n_inner vocab_size activation_function "
    "scale_attn_by_inverse_layer_idx scale_attn_weights layer_norm_epsilon tie_word_embeddings "
    "add_cross_attention",
    "llama": "num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size "
    "intermediate_size vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters hidden_act attention_bias mlp_bias use_sliding_window tie_word_embeddings",
}


@pytest.mark.parametrize("value", [None, "x", [0]])
@pytest.mark.parametrize("kind,key", [(kind, key) for kind in READ for key in READ[kind].split()])
def test_a_null_is_no_default_but_where_theirs_has_one(kind, key, value):
    """And what is of another type is refused by its name."""
    config = to_config(MODELS[kind])
    if value is None and key in OPTIONAL:
        without = {name: each for name, each in config.items() if name != key}
        assert from_config(config | {key: None}) == from_config(without)
    else:
        with pytest.raises(UserError, match=f"its ({key}|rotary positions)"):
            from_config(config | {key: value})


@pytest.mark.parametrize(
    "table,message",
    [
        ({"rope_type": "default", "rope_theta": None}, "its rope_theta is None"),
        ({"rope_type": "llama3", "factor": None}, "its factor is None"),
        ({"rope_type": None, "factor": 2.0}, "its rotary positions are scaled by"),
        ({"rope_type": "llama3"}, "Missing required keys .*'factor'"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "its partial_rotary_factor is 0.5",
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_null_in_a_table_of_rotary_positions_is_no_default(key, table, message):
    scaled = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 8192
    with pytest.raises(UserError, match=message):
        from_config(to_config(MODELS["llama"]) | {key: scaled | table})


# As in a config.json of transformers 4: what the class has not by default.
STRETCHED = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
STRETCHED |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
PUBLISHED = {
    "deepseek-v3": {"model_type": "deepseek_v3", "rope_scaling": STRETCHED},
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", "rope_theta": 1_000_000, "rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_defaults_of_a_class_are_the_shape_that_it_was_made_for(size):
    table = from_config({"rope_theta": 10_000, **PUBLISHED[size]})
    assert {name: table[name] for name in SIZES[size]} == SIZES[size]


def test_a_kimi_is_read_as_a_deepseek():
    """transformers does not know its model_type."""
    config = to_config(MODELS["deepseek"])
    assert from_config(config | {"model_type": "kimi_k2"}) == from_config(config)
    del config["num_hidden_layers"], config["n_group"]
    found = from_config(config | {"model_type": "kimi_k2"})
    assert (found["n_layer"], found["n_group"]) == (61, 8)  # those of the class DeepseekV3Config


@pytest.mark.parametrize(
    "kind,changes,message",
    [
        ("llama", {"model_type": "mamba"}, "model_type is 'mamba': models of gpt2, llama, mistral"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2: only models with 1"),
        ("qwen3-moe", {"norm_topk_prob": "x"}, "norm_topk_prob is 'x'"),
        ("qwen3-moe", {"num_experts": "x"}, "num_experts is 'x'"),
        ("glm", {"topk_group": 2}, "topk_group is 2: only models with 1"),
        ("glm", {"partial_rotary_factor": None}, "partial_rotary_factor is None: it must be"),
        ("glm", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1: .* at least 0"),
        ("glm", {"n_shared_experts": 0}, "n_shared_experts is 0: .* at least 1"),
        ("glm", {"routed_scaling_factor": None}, "routed_scaling_factor is None"),
        ("qwen3-moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only models"),
        ("deepseek", {"model_type": "glm_moe_dsa"}, "model_type is 'glm_moe_dsa': models of"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2: only models with 1"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method is 'greedy': only models with"),
        ("deepseek", {"n_group": 0}, "n_group is 0: .* at least 1"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(kind, changes, message):
    with pytest.raises(UserError, match=message):
        from_config(to_config(MODELS[kind]) | changes)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"qk_norm": True, "qkv_bias": True}, "model.qk_norm and model.qkv_bias"),
        ({"n_expert": 4, "qkv_bias": True}, "model.n_expert and model.qkv_bias"),
        ({"n_expert": 4, "norm_topk_prob": False}, "model.norm_topk_prob"),
        ({"n_expert": 4, "n_expert_shared": 1}, "model.n_expert and model.n_expert_shared"),
        ({"n_expert": 4, "n_dense": 1}, "model.n_dense and model.n_expert"),
        ({"n_expert": 4, "rotary_fraction": 0.5}, "model.n_expert and model.rotary_fraction"),
        (
            {"n_expert": 4, "router": "sigmoid"},
            "has model.n_expert and model.router without",
        ),
        ({"rotary_fraction": 0.5}, "has model.rotary_fraction without"),
    ],
)
def test_a_shape_that_no_class_of_theirs_has_is_refused_by_name(changes, message):
    args = dataclasses.replace(LLAMA, **changes)
    with pytest.raises(UserError, match=message):
        to_config(Llama(args))


@pytest.mark.parametrize(
    "changes", [{"n_expert_shared": 0}, {"router": "softmax", "n_group": 1, "topk_group": 1}]
)
def test_experts_that_deepseek_v3_has_not_are_refused_by_name(changes):
    model = Deepseek(dataclasses.replace(DEEPSEEK, **changes))
    with pytest.raises(UserError, match="DeepSeek-V3 has model.router = .* model.n_expert_shared"):
        to_config(model)
