"""The warning of a default learning rate on a model of another size."""

from torchmars.config.load import is_set, load_config, load_sources
from torchmars.training.default_lr import default_lr_warnings


def warnings(*args):
    assert not is_set(load_sources(list(args), "test"), "optimizer.lr")
    return default_lr_warnings(load_config(list(args), "test"))


def test_the_preset_of_the_size_and_the_rule_is_named():
    [large] = warnings("llama_8b.toml", "optimizers/mars_m.toml")
    assert "default 0.006 is a rate for models of 124 million" in large and "8,030,261,248" in large
    assert "the preset llama-8b-mars-m-fineweb-edu has 0.0003" in large
    [qwen] = warnings("qwen3_8b.toml", "optimizers/adamw.toml")
    assert "the preset qwen3-8b-adamw-fineweb-edu has" in qwen
    [small] = warnings("--model.size", "nano")
    assert "torchmars lr-find proposes rates" in small


def test_a_model_of_the_published_size_has_none():
    assert not warnings("gpt2_small.toml") and not warnings("llama_160m.toml")


def test_a_preset_and_an_option_set_the_rate():
    assert is_set(load_sources(["llama-8b-mars-m-fineweb-edu"], "test"), "optimizer.lr")
    assert is_set(load_sources(["llama_8b.toml", "--optimizer.lr", "1e-3"], "test"), "optimizer.lr")
