"""Plugins register under new names; one that is wrong ends in one line, never in success."""

import os
import sys

import pytest

from torchmars import register
from torchmars.config.load import config_from_tables, load_config
from torchmars.config.model import MODELS
from torchmars.config.plugins import load_plugins
from torchmars.config.source import KINDS
from torchmars.core.errors import UserError
from torchmars.data.corpus import READERS
from torchmars.models import build_meta_model
from torchmars.models.gpt2 import GPT2
from torchmars.models.model import Model
from torchmars.optim.rules import RULES, AdamW
from torchmars.records.trackers import TRACKERS

TABLES = (MODELS, RULES, KINDS, READERS, TRACKERS)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a plugin of a text; returns its name. All is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = [dict(table) for table in TABLES]

    def write(text):
        (tmp_path / "my_plugin.py").write_text(text)
        return "my_plugin"

    yield write
    sys.modules.pop("my_plugin", None)
    for table, entries in zip(TABLES, before):
        table.clear(), table.update(entries)


@pytest.mark.parametrize(
    "text,said",
    [
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("class E(Exception): pass\nraise E('two\\nlines')", "E: two lines"),
        ("1 +", "my_plugin.py, line 1"),
        ("import nothing_of_it", "No module named 'nothing_of_it'"),
    ],
)
def test_one_that_raises_anything(plugin, text, said):
    with pytest.raises(UserError) as found:
        load_plugins([plugin(text)])
    assert said in str(found.value) and "cannot import my_plugin" in str(found.value)
    assert "\n" not in str(found.value)


def test_ctrl_c_is_not_taken_for_an_error_of_it(plugin):
    with pytest.raises(KeyboardInterrupt):
        load_plugins([plugin("raise KeyboardInterrupt")])


@pytest.mark.parametrize(
    "table,name",
    [(MODELS, "gpt2"), (RULES, "adamw"), (KINDS, "text"), (READERS, "text"), (TRACKERS, "wandb")],
)
def test_a_name_that_is_taken_is_refused(plugin, table, name):
    table.setdefault(name, None)
    before = table[name]
    with pytest.raises(UserError, match=f"{name} is registered already: give yours another"):
        register(table, name, AdamW())
    assert table[name] is before


def test_one_in_the_current_folder_is_imported_once(plugin, tmp_path):
    name = plugin(
        "from torchmars import register\nfrom torchmars.optim.rules import RULES, AdamW\n"
        "register(RULES, 'mine', AdamW())"
    )
    for _ in range(2):
        load_plugins([name])
    assert isinstance(RULES["mine"], AdamW) and os.getcwd() == str(tmp_path)


OWN_SETTING = """
from dataclasses import dataclass
from torchmars import register
from torchmars.optim.rules import RULES, AdamW

@dataclass(frozen=True)
class Settings(AdamW.config):
    mine: float = 0.1

class Mine(AdamW):
    name, config, own = "mine", Settings, ("mine",)

register(RULES, "mine", Mine())
"""


@pytest.mark.parametrize("files", [[], ["run.toml"]])
def test_a_rules_own_setting_is_an_option(plugin, tmp_path, files):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 3\n")
    words = ["--optimizer.mine", "0.5", "--optimizer.name", "mine", "--plugins"]
    config = load_config([*files, *words, plugin(OWN_SETTING)], "test")
    assert config.optimizer.mine == 0.5 and config.training.steps == (3 if files else 300)


@pytest.mark.parametrize(
    "made,said",
    [
        (lambda: None, "must have settings, a class that derives from ModelArgs .*got None"),
        (lambda: type("Mine", (), {"settings": GPT2.settings}), "must derive from Model"),
        (
            lambda: type("Mine", (Model,), {"settings": GPT2.settings}),
            "must define describe, embed, transform",
        ),
        (
            lambda: type(
                "Mine", (GPT2,), {"__init__": lambda self, args: Model.__init__(self, args)}
            ),
            "must have tok_embed, blocks, ",
        ),
    ],
)
def test_a_class_that_is_no_model(plugin, made, said):
    register(MODELS, "mine", made())
    with pytest.raises(UserError, match=said) as found:
        config = config_from_tables({"model": {"name": "mine"}}, "in a test")
        build_meta_model(config.model, 257, 32)
    assert "\n" not in str(found.value)


def test_a_command_with_one_that_exits_is_no_success(plugin, call):
    name = plugin("import sys\nsys.exit(0)")
    code, _, err = call("plan", "--world-size", "1", "--plugins", name)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and name in err
