"""Every shipped config is valid with every rule that goes with it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from torchmars.config.load import find_config, load_config
from torchmars.models import build_meta_model
from torchmars.optim.rules import RULES
from torchmars.parallel.checks import check_layout

FOLDER = Path(__file__).parents[2] / "train_configs"
OF_OTHER_NAMES = {"adamw-mars-betas": "adamw", "best": "mars-m"}
SIZES = [file.name for file in sorted(FOLDER.glob("*.toml")) if file.stem != "quickstart"]


def rules_of(folder):
    """The files of rules in a folder, by the rule."""
    files = sorted((FOLDER / folder).glob("*.toml"))
    return {file.stem.replace("_", "-"): f"{folder}/{file.name}" for file in files}


@pytest.mark.parametrize("rule", sorted(rules_of("quickstart")))
def test_quickstarts(rule):
    config = load_config(["quickstart.toml", rules_of("quickstart")[rule]], "test")
    assert config.optimizer.name == rule and config.run.name == f"quickstart-{rule}"
    assert config.model == load_config(["quickstart.toml"], "test").model


def test_the_quickstart_has_the_best_rule():
    config = load_config(["quickstart.toml"], "test")
    assert config.run.name == "quickstart"
    best = load_config(["quickstart.toml", "optimizers/best.toml"], "test").optimizer
    assert best.name == "mars-m" and replace(best, gamma=0.2) == config.optimizer


@pytest.mark.parametrize("rule", RULES)
def test_another_rule_after_the_quickstart_is_as_published(rule):
    """What the best settings change is others' too, so their files set it back."""
    load_config(["quickstart.toml", "--optimizer.name", rule], "test")
    published = RULES[rule].defaults
    names = {"betas", "gamma", "clip", "equilibrate"} & set(published)
    for folder in ("quickstart", "optimizers"):
        optimizer = load_config(["quickstart.toml", rules_of(folder)[rule]], "test").optimizer
        found = {name: getattr(optimizer, name) for name in names}
        assert optimizer.name == rule
        if (folder, rule) == ("quickstart", "muon"):  # at its own best
            assert found == {"betas": (0.85, 0.99), "equilibrate": True}
        else:
            assert found == {name: published[name] for name in names}, rules_of(folder)[rule]


@pytest.mark.parametrize("rule", sorted(rules_of("optimizers")))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, rule):
    config = load_config([size, rules_of("optimizers")[rule]], "test")
    assert config.optimizer.name == OF_OTHER_NAMES.get(rule, rule)
    if size.startswith("gpt2_small"):
        assert (
            config.training.global_batch_size * config.training.seq_len * config.training.steps
            == 49_152_000_000
        )
        for gpus in (1, 2, 4, 8, 16, 32):
            config.training.microbatches(gpus)


@pytest.mark.parametrize("name,ranks", [("8b", 64), ("70b", 256), ("405b", 1024)])
def test_large_configs_fit_their_ranks(name, ranks):
    config = load_config([f"llama_{name}.toml"], "test")
    model = build_meta_model(config.model, 50257, config.training.seq_len)
    assert (model.vocab_rows, model.seq_len) == (128_256, 8192)
    check_layout(config, config.parallelism.degrees(ranks), model)


def test_there_is_one_of_each_kind_for_each_rule():
    assert set(rules_of("optimizers")) == {*RULES, *OF_OTHER_NAMES}
    assert set(rules_of("quickstart")) == set(RULES) and SIZES


def test_files_here_come_before_those_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.path.samefile(find_config("quickstart.toml"), FOLDER / "quickstart.toml")
    (tmp_path / "quickstart.toml").write_text("[training]\nsteps = 7\n")
    assert load_config(["quickstart.toml"], "test").training.steps == 7
