"""Settings of before: the old name of a field is read with one warning, a setting that is gone."""

import os
from dataclasses import dataclass, replace
from typing import Annotated

import pytest

import torchmars
from tests.formats import written_by_0_1_0 as written
from tests.formats.test_formats import CONFIG
from torchmars.checkpoint import manifest as manifests
from torchmars.comparison.settings import written as written_settings
from torchmars.config import (
    Config,
    GroupConfig,
    ModelConfig,
    OptimizerConfig,
    ResolvedConfig,
    TrainingConfig,
)
from torchmars.config import optimizer as config_optimizer
from torchmars.config.fields import Was, with_settings
from torchmars.config.history import TOLD, names_of
from torchmars.config.load import config_from_tables, is_set, load_config, sources_of
from torchmars.config.model import fields_of_families
from torchmars.config.model_args import ModelArgs
from torchmars.core.bounds import Range
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES


@pytest.fixture
def renamed(monkeypatch):
    """Fields and a section that had other names: TrainingConfig.steps was called length."""

    def rename(kind, name, old):
        annotations = next(a for each in kind.__mro__ if name in (a := each.__annotations__))
        monkeypatch.setitem(annotations, name, Annotated[annotations[name], Was(old)])

    rename(TrainingConfig, "steps", "length")
    rename(GroupConfig, "split", "parts")
    rename(OptimizerConfig, "gamma", "strength")
    rename(Config, "guards", "alarms")
    monkeypatch.setattr(os, "environ", {**os.environ})  # it has what was told
    os.environ.pop(TOLD, None)
    names_of.cache_clear()
    yield
    names_of.cache_clear()


def test_a_file_with_old_names_is_read_with_one_warning_each(renamed, tmp_path, capsys):
    file = tmp_path / "old.toml"
    file.write_text(
        "[training]\nlength = 7\n[alarms]\nspike_sigmas = 5.0\n[optimizer.matrix]\nparts = 3\n"
        "[optimizer]\nname = 'mars-m'\nstrength = 0.125\n"
        "[[optimizer.groups]]\npattern = '*qkv*'\nparts = 3\n"
    )
    for _ in range(2):
        config = load_config([str(file)], "test")
    assert config.training.steps == 7 and config.guards.spike_sigmas == 5
    assert config.optimizer.gamma == 0.125
    assert config.optimizer.matrix.split == config.optimizer.groups[0].split == 3
    told = sorted(capsys.readouterr().err.splitlines())
    assert [line.split()[1] for line in told] == [
        "alarms",
        "optimizer.groups.parts",
        "optimizer.matrix.parts",
        "optimizer.strength",
        "training.length",
    ]
    assert told[-1] == (
        f"warning   training.length is called training.steps now: rename it (in {file})"
    )
    assert is_set(sources_of([str(file)]), "training.steps")


def test_the_command_line_may_have_an_old_name_with_the_type_of_the_new_one(renamed, capsys):
    config = load_config(["--training.length", "7", "--alarms.loss_spike", "skip"], "test")
    assert config.training.steps == 7 and config.guards.loss_spike == "skip"
    assert capsys.readouterr().err.count("warning ") == 2
    with pytest.raises(UserError, match="training.steps must be at least 1, got 0"):
        load_config(["--training.length", "0"], "test")


def test_of_an_old_and_a_new_name_the_later_source_wins_and_one_source_has_one(renamed, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text("[training]\nlength = 7\n")
    assert load_config([str(file), "--training.steps", "8"], "test").training.steps == 8
    file.write_text("[training]\nlength = 7\nsteps = 7\n")
    with pytest.raises(UserError, match="is called training.steps now, and both are set .*old"):
        load_config([str(file)], "test")


def test_what_a_run_left_with_an_old_name_is_read_in_silence(renamed, tmp_path, capsys):
    """Nobody should rename anything there: a manifest that was changed is damaged."""
    config = {**CONFIG, "training": {**CONFIG["training"]}}
    config["training"]["length"] = config["training"].pop("steps")
    written.write_run(tmp_path / "old", config, written.write_shards(tmp_path / "data"))
    assert torchmars.read_run(tmp_path / "old").config["training"]["steps"] == 6
    [folder] = (tmp_path / "old" / "checkpoints").iterdir()
    assert manifests.read(folder).config["training"]["steps"] == 6
    assert torchmars.load(tmp_path / "old").model is not None
    assert "is called" not in capsys.readouterr().err


def test_a_comparison_with_old_names_is_continued(renamed, tmp_path):
    file = tmp_path / "comparison.toml"
    file.write_text(
        "[config.training]\nlength = 7\n[contenders.ours]\nname = 'muon'\nexact_fraction = 1.0\n"
        "[contenders.ours.matrix]\nparts = 3\n"
    )
    assert written_settings(file) == {
        "config": {"training": {"steps": 7}},
        # Its trials had whole heads, by the default of then.
        "contenders": {"ours": {"name": "muon", "matrix": {"split": 3}, "per_head": False}},
    }
    file.write_text(
        "[config]\n[contenders.ours]\nname = 'muon'\nper_head = 'auto'\n[contenders.other]\n"
    )
    assert written_settings(file)["contenders"] == {
        "ours": {"name": "muon", "per_head": "auto"},
        "other": {},
    }


def test_a_setting_of_rules_says_its_old_name_itself(monkeypatch):
    @dataclass(frozen=True)
    class Plain:
        rule: str = ""

    adamw = type(RULES["adamw"])
    settings = [replace(each, was="rate") if each.name == "lr" else each for each in adamw.settings]
    monkeypatch.setattr(adamw, "settings", tuple(settings))
    monkeypatch.setattr(config_optimizer, "RULES", {"adamw": adamw()})
    names = names_of(with_settings(Plain, config_optimizer.fields_of_rules("both")))
    assert names["lr"] == ("rate", None) and names["betas"] == ("", None)


def test_a_rank_says_nothing_but_the_first_one(renamed, monkeypatch, capsys):
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setitem(os.environ, "RANK", rank)
        load_config(["--training.length", "7"], "test")
        assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("value", [1, 1.0])
def test_what_is_gone_and_changes_nothing_is_dropped_in_silence(value, capsys, tmp_path):
    tables = {"optimizer": {"mode": "exact", "exact_fraction": value}}
    assert isinstance(config_from_tables(tables, "in a test"), ResolvedConfig)
    load_config(["--optimizer.exact_fraction", str(value)], "test")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", [0.5, 2, 0, True, "1"])
def test_what_is_gone_and_would_change_something_is_refused_with_its_place(value):
    tables = {"optimizer": {"exact_fraction": value}}
    with pytest.raises(UserError) as refused:
        config_from_tables(tables, "in a test")
    assert str(refused.value).startswith(
        "optimizer.exact_fraction is a setting no more (in a test): a new run has none"
    )
    if value != "1":
        with pytest.raises(UserError, match="no more .on the command line.: a new run has none"):
            load_config(["--optimizer.exact_fraction", str(value)], "test")


def test_of_two_sources_the_later_one_says_whether_what_is_gone_is_dropped(tmp_path, capsys):
    base, above = tmp_path / "base.toml", tmp_path / "above.toml"
    base.write_text("[optimizer]\nexact_fraction = 0.5\n")
    above.write_text(f"extends = ['{base}']\n[optimizer]\nexact_fraction = 1\n")
    load_config([str(above)], "test")
    load_config([str(base), "--optimizer.exact_fraction", "1"], "test")
    with pytest.raises(UserError, match="no more .on the command line"):
        load_config([str(above), "--optimizer.exact_fraction", "0.5"], "test")


def test_a_table_in_the_place_of_what_is_gone_is_refused_as_it_is():
    with pytest.raises(UserError, match="^optimizer.exact_fraction is a setting no more"):
        config_from_tables({"optimizer": {"exact_fraction": {"a": 1}}}, "in a test")


def test_a_setting_of_a_model_says_its_old_name_too():
    """Also one whose default follows from the size, in whose type None is possible then."""

    @dataclass(frozen=True, kw_only=True)
    class Args(ModelArgs):
        sizes = {"nano": {"width": 8}}
        width: Annotated[int, Range(1, 9), Was("n_embd")]
        """Size of a hidden state."""
        scale: Annotated[float, Was("factor")] = 1.0
        """Of the output."""

    names = names_of(with_settings(ModelConfig, fields_of_families({"": Args})))
    assert names["width"][0] == "n_embd" and names["scale"][0] == "factor"
    assert names["n_layer"][0] == ""
