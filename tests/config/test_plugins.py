"""Plugins that are wrong: one line that says what is, never a success, a traceback or a rest."""

import os
import sys

import pytest

from torchmars.config.entries import TABLES, check_tables
from torchmars.config.load import config_from_tables, load_config
from torchmars.config.model import MODELS
from torchmars.config.plugins import load_plugins
from torchmars.config.source import KINDS, SourceKind, reader_of
from torchmars.core.errors import UserError
from torchmars.data.reading import READERS
from torchmars.models import build_meta_model
from torchmars.optim.rules import RULES

RULE = """
from torchmars.optim.rules import RULES, ElementwiseRule, MatrixRule
from torchmars.optim.settings import BETAS, EPS, LR, MATRIX_SETTINGS, WEIGHT_DECAY
class Mine(ElementwiseRule):
    name = "mine"
    settings = (LR.of(0.1), BETAS.of((0.9, 0.9)), EPS, WEIGHT_DECAY.of(0.1))
    def buffers(self, clip, exact, stacks):
        return ("exp_avg",)
    def momentum(self, old, c, f):
        return old
    def direction(self, old, new, c, f):
        return c
"""
MODEL = """
from torchmars.config.model import MODELS
from torchmars.models.gpt2 import GPT2
from torchmars.models.model import Model
class Mine(GPT2):
    pass
"""
READER = "from torchmars.data.reading import READERS\n"
KIND = "from torchmars.config.source import KINDS, SourceKind\n"


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a plugin of a text; returns its name. All is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = [dict(table) for table in TABLES.values()]

    def write(text):
        (tmp_path / "my_plugin.py").write_text(text)
        return "my_plugin"

    yield write
    sys.modules.pop("my_plugin", None)
    for table, entries in zip(TABLES.values(), before):
        table.clear(), table.update(entries)


def line_of(plugin):
    """What is said of a plugin, after which nothing of it is left."""
    before = [dict(table) for table in TABLES.values()]
    with pytest.raises(UserError) as found:
        load_plugins([plugin])
    assert "my_plugin" not in sys.modules and [*TABLES.values()] == before
    assert "\n" not in str(found.value) and "my_plugin" in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    "text,said",
    [
        ("import sys\nsys.exit(0)", "my_plugin.py, line 2,"),
        ("import argparse\n\nargparse.ArgumentParser().parse_args(['--help'])", "line 3"),
        ("class E(BaseException): pass\nraise E('two\\nlines')", "E: two lines"),
        ("1 +", "my_plugin.py, line 1"),
        ("import nothing_of_it", "line 1, which raises that"),
    ],
)
def test_one_that_raises_anything(plugin, text, said, capsys):
    assert said in line_of(plugin(text))


def test_ctrl_c_is_not_taken_for_an_error_of_it(plugin):
    with pytest.raises(KeyboardInterrupt):
        load_plugins([plugin("raise KeyboardInterrupt")])


@pytest.mark.parametrize(
    "text,said",
    [
        *(
            (f"{MODEL}MODELS['mine'] = {entry}", "MODELS['mine'] must be the place of its class")
            for entry in ("None", "Mine", "'mine'", "'my plugin.Mine'")
        ),
        *(
            (f"{RULE}RULES['mine'] = {entry}", "RULES['mine'] must be an ElementwiseRule")
            for entry in ("None", "Mine")
        ),
        (f"{RULE}RULES['other'] = Mine()", "must have that name, and has 'mine'"),
        (f"{RULE}del Mine.settings\nRULES['mine'] = Mine()", "must have settings"),
        (f"{RULE}Mine.settings = (LR.of(1),)\nRULES['mine'] = Mine()", "betas, eps, weight_decay"),
        (f"{RULE}Mine.buffers = lambda *a: 'exp_avg'\nRULES['mine'] = Mine()", "tuple of names"),
        (f"{RULE.replace('def momentum', 'def step')}RULES['mine'] = Mine()", "abstract method"),
        (f"{RULE}RULES['adamw'] = Mine()", "RULES['adamw'] is there already"),
        *(
            (f"{KIND}KINDS['mine'] = {entry}", "KINDS['mine'] must be a SourceKind")
            for entry in ("None", "SourceKind")
        ),
        (f"{KIND}KINDS['mine'] = SourceKind('glob')", "must have parts, a tuple of texts"),
        (f"{KIND}KINDS['mine'] = SourceKind(('glob', 'sheet'))", "has the parts sheet"),
        (f"{KIND}KINDS['openwebtext'] = SourceKind()", "stands for hf:Skylion007/openwebtext"),
        *(
            (f"{READER}READERS['mine'] = {entry}", "READERS['mine'] must be a function")
            for entry in ("None", "'my_plugin.read'")
        ),
        (f"{KIND}KINDS['text'] = SourceKind(('glob',))", "KINDS['text'] is there already"),
        *(
            (f"{KIND}KINDS[{name!r}] = SourceKind()", "has no name that can be written")
            for name in ("", "a b", "a:b", "-a", "a\n", 3)
        ),
    ],
)
def test_an_entry_that_is_none(plugin, text, said):
    assert said in line_of(plugin(text))


def test_an_entry_of_a_module_that_a_program_imports_itself(monkeypatch):
    """No plugin is named then: the config says so."""
    for table, entry in ((MODELS, None), (RULES, RULES["adamw"]), (KINDS, ())):
        with monkeypatch.context() as patch:
            patch.setitem(table, "mine", entry)
            with pytest.raises(UserError, match=r"\['mine'\]"):
                config_from_tables({}, "in a test")
    check_tables()


def test_a_good_one_is_taken_after_it_was_mended(plugin):
    assert "must be the place" in line_of(plugin(f"{MODEL}MODELS['mine'] = None"))
    for _ in range(2):  # the second time it is there already, and the same
        load_plugins(
            [plugin(f"{MODEL}{RULE}MODELS['a'] = 'my_plugin.Mine'\nRULES['mine'] = Mine()")]
        )
    assert MODELS["a"] == "my_plugin.Mine" and RULES["mine"].name == "mine"


def test_arguments_and_folder_are_the_users(plugin, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchmars", "a.toml"])
    load_plugins([plugin("import os, sys\nsys.argv = ['x']\nos.chdir('/')\nprint('hello')")])
    assert sys.argv == ["torchmars", "a.toml"] and os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    "text,said",
    [
        ("", "cannot be had"),
        ("Mine = None", "must have settings, a class that derives from ModelArgs .*got None"),
        ("class Mine: settings = GPT2.settings", "must derive from Model"),
        ("class Mine(Model): settings = GPT2.settings", "must define describe, embed, transform"),
        ("class Args(Mine.settings): sizes = {}\nMine.settings = Args", "with named sizes"),
        (
            "Mine.__init__ = lambda self, args: Model.__init__(self, args)",
            "must have tok_embed, blocks, ",
        ),
        ("import sys; sys.exit(0)", "calls sys.exit"),
    ],
)
def test_a_class_that_is_no_model(plugin, text, said):
    name = plugin(MODEL.replace("class Mine(GPT2):\n    pass\n", "") if not text else MODEL + text)
    MODELS["mine"] = f"{name}.Mine"
    sys.path.append(os.getcwd())
    with pytest.raises(UserError, match=said) as found:
        config = config_from_tables({"model": {"name": "mine"}}, "in a test")
        build_meta_model(config.model, 257, 32)
    assert "\n" not in str(found.value)


def test_a_kind_without_a_reader(plugin, monkeypatch):
    monkeypatch.setitem(KINDS, "mine", SourceKind(("glob",), (".x",)))
    assert config_from_tables({"data": {"source": "mine:a"}}, "in a test").data.source == "mine:a"
    for readers in (READERS, {"mine": None}, {"mine": 3}):
        with pytest.raises(UserError, match=r"READERS\['mine'\] must be a function"):
            reader_of(readers, "mine")


def test_a_command_with_one_that_exits_is_no_success(plugin, call):
    name = plugin("import sys\nsys.exit(0)")
    code, _, err = call("plan", "--world-size", "1", "--plugins", name)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and name in err


def test_a_command_whose_hook_exits_is_no_success(plugin, call):
    text = "import sys\nMine.__init__ = lambda *a: sys.exit(0)\nMODELS['mine'] = 'my_plugin.Mine'"
    name = plugin(f"{MODEL}{text}")
    code, _, err = call("plan", "--world-size", "1", "--plugins", name, "--model.name", "mine")
    assert code == 2 and err.count("\n") == 1
    assert f"{name}.py, line 8, calls sys.exit(0)" in err


def test_the_packages_own_entries_are_good():
    """By the same checks."""
    check_tables({title: {} for title in TABLES})
    assert load_config([], "test").model.name in MODELS
