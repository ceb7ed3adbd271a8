"""examples/gemma3.py: a family that a plugin brings, with its table of transformers' names."""

import copy
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch

from tests.support.commands import ROOT, finish_run, run_command
from tests.support.full import FULL
from tests.support.tiny import metrics, tiny_tables, write_text
from torchmars.comparison.sizes import check_sizes
from torchmars.config import model_config
from torchmars.config.load import config_from_tables
from torchmars.config.model import MODELS
from torchmars.core.errors import UserError
from torchmars.exchange.families import FAMILIES, counterparts, from_config, to_config
from torchmars.models import build_model
from torchmars.models.cache import Cache

transformers = pytest.importorskip("transformers")
SHAPE = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
SHAPE["layer_types"] = SHAPE["layer_types"][:4]


@pytest.fixture
def plugin(monkeypatch):
    """The plugin, loaded in this process; not there afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("gemma3")
    del sys.modules["gemma3"], MODELS["gemma3"], FAMILIES["gemma3"]


@pytest.mark.full
def test_its_learning_rates_transfer(plugin):
    """The change of logits falls with the width to what is learned: no alarm."""
    section = {"name": "gemma3", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2}
    section |= {"head_dim": 16, "query_width": 16, "n_inner": 192, "window_blocks": "sf"}
    tables = {"model": section, "optimizer": {"name": "adamw", "lr": 1e-3}}
    lines, good = check_sizes(
        config_from_tables(tables, "in a test"), [64, 128, 256, 512], [], False
    )
    assert good, lines


def model_of(table):
    """The model of a section [model], with its length beside it."""
    length = table.pop("seq_len")
    config = config_from_tables({"model": table | {"vocab_size": 96}}, "in a test")
    return build_model(config.model, 96, length)


def theirs_and_ours(folder):
    """A model of transformers with random weights, and ours of its config with the same."""
    config = transformers.Gemma3TextConfig(**SHAPE)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    config.save_pretrained(folder)
    table = from_config(json.loads((Path(folder) / "config.json").read_text()))
    ours = model_of(table)
    state, generator = theirs.state_dict(), torch.Generator().manual_seed(0)
    for name, there in counterparts(ours).items():
        parameter = ours.get_parameter(name)
        torch.nn.init.normal_(parameter, 0.0, 0.2 if "norm" in name else 0.1, generator)
        state[there.name].copy_(parameter.detach())
    return theirs.eval(), ours.eval()


def test_logits_gradients_and_greedy_tokens_are_those_of_transformers(plugin, tmp_path):
    theirs, ours = theirs_and_ours(tmp_path)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (2, 40), generator=generator)
    logits, expected = ours.head(ours(tokens)), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).mean().backward()
    (expected * weights).mean().backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    for name, there in counterparts(ours).items():
        apart = ours.get_parameter(name).grad - gradients[there.name]
        assert apart.norm() < 1e-5 * gradients[there.name].norm(), name
    prompt = tokens[:1, :5]
    drawn = theirs.generate(prompt, max_new_tokens=50, do_sample=False, pad_token_id=0)
    cache, found = Cache(copy.deepcopy(ours), 64), prompt[0].tolist()
    logits = cache.start([found])
    for _ in range(50):
        found.append(int(logits[0].argmax()))
        logits = cache.go_on(found[-1:])
    assert found == drawn[0].tolist()


def test_a_config_goes_there_and_back(plugin, tmp_path):
    _, ours = theirs_and_ours(tmp_path)
    written = to_config(ours)
    again = from_config(written)
    assert model_of(again).args == ours.args
    read = transformers.AutoConfig.for_model(**written)
    assert read.layer_types == SHAPE["layer_types"]
    for kind, table in SHAPE["rope_parameters"].items():
        assert table.items() <= read.rope_parameters[kind].items()


def test_defaults_are_those_of_the_class(plugin):
    theirs = transformers.Gemma3TextConfig().to_dict()
    found = from_config({"model_type": "gemma3_text"})
    slides = ["s" if kind == "sliding_attention" else "f" for kind in theirs["layer_types"]]
    assert (found["window_blocks"] * 26)[:26] == "".join(slides)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types is 'chunked_attention'"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', which Gemma3TextConfig of trans"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', which Gemma3TextConfig"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters is {'full_attention': 3}"),
    ],
)
def test_what_the_family_lacks_is_refused(plugin, changes, message):
    with pytest.raises(UserError, match=message):
        from_config({"model_type": "gemma3_text"} | changes)


def test_full_blocks_see_all_also_with_one_theta(plugin, tmp_path):
    _, ours = theirs_and_ours(tmp_path)
    args = replace(ours.args, rope_theta=1e4, rope_scaling_factor=1.0)
    model = plugin.Gemma3(args).eval()
    model.load_state_dict(ours.state_dict())
    tokens = torch.arange(40)[None]
    other = tokens.clone()
    other[0, 0] = 7
    assert (model(tokens)[0, -1] - model(other)[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("setting", ["tied", "qk_norm"])
def test_what_llama_alone_has_is_refused(plugin, tmp_path, setting):
    _, ours = theirs_and_ours(tmp_path)
    with pytest.raises(UserError, match=f"model.{setting} of a Gemma 3 must be True"):
        replace(ours.args, **{setting: False}).check()


@pytest.mark.parametrize(
    "size,rows,parameters",
    [
        ("270m", 262_144, 268_098_176),
        ("1b", 262_144, 999_885_952),
        ("4b", 262_208, 3_880_263_168),
        ("12b", 262_208, 11_766_034_176),
        ("27b", 262_208, 27_009_346_304),
    ],
)
def test_published_sizes(plugin, size, rows, parameters):
    with torch.device("meta"):
        model = build_model(model_config(name="gemma3", size=size, vocab_size=rows), rows, 64)
    assert model.parameter_count == parameters


@FULL
def test_it_trains_on_layouts_and_comes_back_from_an_export(tmp_path):
    shutil.copy(ROOT / "examples" / "gemma3.py", tmp_path)  # not imported here
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"dtype": "float32", "steps": 4, "seq_len": 32})
    del tables["run"]["name"]
    shape = {"n_layer": 2, "n_embd": 32, "n_inner": 48, "head_dim": 16, "query_width": 16}
    tables["model"] = {"name": "gemma3", "size": "nano", "window": 8, "window_blocks": "sf"} | shape
    (tmp_path / "gemma.toml").write_text(tomli_w.dumps(tables))
    losses = {}
    for layout, ranks in {"dp_shard": 1, "tp": 2, "cp": 2, "pp": 2}.items():
        words = ["--plugins", "gemma3", "--run.name", layout, f"--parallelism.{layout}", str(ranks)]
        code, _, err = finish_run(tmp_path / "gemma.toml", *words, ranks=ranks, NGPU=str(ranks))
        assert code == 0, err
        losses[layout] = metrics({"run": {"name": layout, "folder": str(tmp_path / "runs")}})
        assert losses[layout] == pytest.approx(losses["dp_shard"], rel=1e-5)
    code, _, err = run_command("export", ["runs/tp", "hf", "--plugins", "gemma3"], tmp_path)
    assert code == 0, err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "Gemma3ForCausalLM"
    code, _, err = run_command("import", ["hf", "again.toml", "--plugins", "gemma3"], tmp_path)
    assert code == 0, err
    assert 'name = "gemma3"' in (tmp_path / "again.toml").read_text()
    words = ["hf", "--plugins", "gemma3", "--prompt", "The", "--max_tokens", "5"]
    code, out, err = run_command("generate", words, tmp_path)
    assert code == 0 and out.startswith("The"), err
