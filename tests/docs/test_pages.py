"""Links of README.md and docs/ lead somewhere, and what the pages say of files is so."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, blocks, links
from torchmars.commands import commands
from torchmars.config.load import load_config
from torchmars.exchange.families import FAMILIES

README = ROOT / "README.md"
NAMES = [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_exist(page):
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_are_short(page):
    lines = page.read_bytes().splitlines()  # pre-commit counts bytes too
    assert not [line for line in lines if len(line) > 100]


def test_readme_is_short_and_leads_to_every_page():
    text = README.read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 900
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert set(PAGES) - {README} <= linked


def test_quickstart_is_the_documented_one():
    [transcript] = [
        block.text for block in blocks("text") if block.page == README and "step   1/" in block.text
    ]
    config = load_config([str(ROOT / "train_configs" / "quickstart.toml")], "test")
    assert (
        config.optimizer.name == "mars-m"
        and f"step   1/{config.training.steps} | loss" in transcript
        and f"run       {config.run.path}, seed 0" in transcript
    )


# Models of transformers as readers know them. Each is a kind of one of our families.
TITLES = (
    "GPT-2, Llama, Mistral, Ministral, SmolLM3, OLMo 3, Qwen2, Qwen3, Qwen3-MoE, Mixtral, GLM-4.5"
)
TITLES = [*TITLES.split(", "), "DeepSeek-V3", "GLM-4.7-Flash"]
# Text that users read: pages, and the docstrings of which `--help` is made.
TEXTS = [*PAGES, ROOT / "CHANGELOG.md"]
TEXTS += [file for room in ("commands", "config") for file in (ROOT / "torchmars" / room).iterdir()]


def test_who_lists_models_of_transformers_lists_all():
    """But GPT-2 and Llama, of which some lists are not."""
    titles = {title: re.compile(rf"\b{re.escape(title)}\b(?!-)") for title in TITLES}
    listed = 0
    for page in filter(Path.is_file, TEXTS):
        for paragraph in re.split(r"\n\s*\n|\n- ", page.read_text()):
            named = {title for title, pattern in titles.items() if pattern.search(paragraph)}
            if len(named) >= 4:
                listed += 1
                assert named >= titles.keys() - {"GPT-2", "Llama"}, (page, paragraph)
    assert listed >= 3
    text = " ".join(import_module("torchmars.commands.import").Import.__doc__.split())
    assert f"{', '.join(TITLES[:-1])} and {TITLES[-1]}." in text
    assert len(TITLES) == sum(len(family.kinds) for family in FAMILIES.values())


def test_every_command_is_in_the_list_of_commands():
    listed = (ROOT / "docs" / "config.md").read_text()
    assert not [name for name in commands() if f"| `torchmars {name}` |" not in listed]


def test_the_map_has_each_room_and_no_file_that_is_gone():
    [tree] = [block.text for block in blocks("text") if block.text.startswith("torchmars/\n")]
    named, folders = [], []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        named.append("".join(folders))
    assert not [name for name in named if not (ROOT / name).exists()], "not there"
    rooms = {f"torchmars/{file.parent.name}/" for file in ROOT.glob("torchmars/*/__init__.py")}
    assert rooms <= set(named), "a room that docs/architecture.md does not name"


def test_pages_that_other_files_name_exist():
    """In code, configs, messages, tests and the changelog, each with its anchor."""
    files = [each for each in ROOT.iterdir() if each.is_file()]
    for folder in ("torchmars", "train_configs", "examples", "tests", ".ci", ".github"):
        files += [each for each in (ROOT / folder).rglob("*") if each.is_file()]
    named = [
        (file.relative_to(ROOT), *each)
        for file in files
        if file.suffix in ("", ".md", ".py", ".sh", ".toml", ".yml")
        for each in re.findall(r"\b(docs/[\w/.]+\.md)(?:#([\w-]+))?", file.read_text())
    ]
    assert len({file for file, *_ in named if file.parts[0] == "torchmars"}) > 5
    assert not [
        (file, page, anchor)
        for file, page, anchor in named
        if not (ROOT / page).exists() or anchor and anchor not in anchors(ROOT / page)
    ]


def test_files_in_backticks_exist():
    pattern = r"`((?:torchmars|tests|docs|train_configs)/[\w/.]+)`"
    for page in PAGES:
        for name in re.findall(pattern, page.read_text()):
            invented = re.search("[A-Z]{2}", name)  # NAME.py, runs/NAME
            assert invented or (ROOT / name).exists(), f"{page.name}: {name}"
