"""What the site is made of: every page in its menu, every public name documented in full."""

import inspect
import pkgutil
import re

import pytest
import yaml

import torchmars
from tests.docs.pages import PAGES, ROOT
from torchmars import api, optim

MADE = {"index.md", "changelog.md", "reference/config.md", "reference/optim.md"}
MADE |= {"reference/python.md"}
PUBLIC = {name: getattr(torchmars, name) for name in torchmars.__all__ if name != "__version__"}
PUBLIC |= {f"optim.{name}": getattr(optim, name) for name in optim.__all__}
METHODS = ("generate", "logits", "evaluate")
PUBLIC |= {f"LanguageModel.{name}": getattr(api.LanguageModel, name) for name in METHODS}
CALLS = {name: each for name, each in PUBLIC.items() if inspect.isfunction(each)}
CALLS["optim.MARS"] = optim.MARS
# What computes something of a paper, or of this project's own rules, says which.
OF_A_PAPER = {"optim.MARS", "optim.lr_factor", "LanguageModel.generate"}


def in_menu(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from in_menu(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_menu_once():
    # Its values of other kinds are Python objects of mkdocs's, of which this needs none.
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT]
    assert sorted(in_menu(menu)) == sorted([*pages, *MADE])


def test_the_site_names_what_there_is():
    text = (ROOT / ".ci" / "site.py").read_text()
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert {*re.findall(r'^    "([\w/]+\.md)": [\d.]+,$', text, re.MULTILINE)} <= {*in_menu(menu)}
    names = re.findall(r"^::: (torchmars\.\S+)$", text, re.MULTILINE)
    assert len(names) > 5
    for name in names:
        assert pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name):
    text = inspect.getdoc(PUBLIC[name])
    assert text and len(text.split()) > 3


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_says_what_it_takes_gives_and_raises(name):
    text, signature = inspect.getdoc(CALLS[name]), inspect.signature(CALLS[name])
    arguments = text.partition("Args:")[2]
    for parameter in signature.parameters:
        if parameter != "self":
            assert f" {parameter}: " in arguments, f"{name} does not document {parameter}"
    nothing = inspect.isclass(CALLS[name]) or signature.return_annotation is None
    assert "Returns:" in text or text.startswith("Return") or nothing
    assert "raise" in text.lower(), f"{name} does not say what it raises"
    if name in OF_A_PAPER:
        assert "arXiv" in text, f"{name} names no source"
