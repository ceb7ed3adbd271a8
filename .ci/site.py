"""What mkdocs makes of this repository beside the pages of docs/: hooks of mkdocs.yml.

The README is the first page, and the changelog is a page. The reference is made from docstrings and
from the dataclasses of the config. Links to files that are no pages become the files' names.
"""

import re
import typing
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from torchmars.config.model import OWN, ModelConfig, family_settings, model_section
from torchmars.config.optimizer import OptimizerConfig
from torchmars.config.sections import sections_of
from torchmars.core.check import Interval, form_of, table_in
from torchmars.core.cli import Option, documentation, options_of, section_text, tables_in
from torchmars.optim.rules import RULES

ROOT = Path(__file__).parents[1]
OPTIM = """# torchmars.optim

The optimizers, for a loop of your own. They need no other package than torch.

::: torchmars.optim.MARS
::: torchmars.optim.param_groups
::: torchmars.optim.lr_factor
"""
PYTHON = """# torchmars

::: torchmars.api.run_training
::: torchmars.api.load
::: torchmars.api.LanguageModel
::: torchmars.api.make_plan
::: torchmars.api.Planned
::: torchmars.records.run.read_run
::: torchmars.records.run.Run
::: torchmars.records.run.Series
::: torchmars.core.errors.UserError
"""

# How much a page counts in a search. Pages that name everything would come first for most words.
BOOSTS = {
    "architecture.md": 0.1,
    "benchmarks.md": 0.5,
    "changelog.md": 0.1,
    "contributing.md": 0.1,
    "data.md": 2,
    "log.md": 0.1,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    pages = {
        "index.md": (ROOT / "README.md").read_text().replace("](docs/", "]("),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("),
        "reference/optim.md": OPTIM,
        "reference/python.md": PYTHON,
        "reference/config.md": "\n".join(config_page()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name files that are no pages instead of linking them; say how much the page counts."""
    if boost := BOOSTS.get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}
    above = "" if page.file.src_uri in ("index.md", "changelog.md") else r"\.\./"
    markdown = re.sub(rf"\]\({above}README\.md", "](index.md", markdown)
    markdown = re.sub(rf"\]\({above}CHANGELOG\.md", "](changelog.md", markdown)
    names = r"LICENSE|AGENTS|CITATION|\.github|examples|train_configs|torchmars"
    outside = rf"\[([^]]*)\]\({above}((?:{names})[^)]*)\)"
    return re.sub(
        outside, lambda m: f"`{m[2]}`" if m[1] in m[2] else f"{m[1]} (`{m[2]}`)", markdown
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Let a search for W&B find it: what is typed has no HTML in it."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.write_text(index.read_text().replace("W&amp;B", "W&B"))


def config_page() -> Iterator[str]:
    """Yield the lines of a page that has a table of the fields of each section of the config."""
    yield "# Every setting\n"
    yield "Each is a key of a TOML file, and an option of commands: `--training.steps 100`."
    yield "A setting without a default is empty, or its meaning says what it follows from.\n"
    yield '<div class="settings" markdown>\n'
    for name, title, text, options, texts in tables():
        yield f"## {title}\n\n{text}\n"
        yield "| setting | type | default | meaning |\n|---|---|---|---|"
        for each in options:
            key = each.name.rpartition(".")[2]
            default = each.text("-").partition("Default: ")[2][:-1]  # as --help has it
            setting = f"`{key}`{{ #{name}.{key} }}"
            cells = setting, type_of(each), f"`{default}`" if default else "", texts.get(key, "")
            cells = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
            yield f"| {' | '.join(cells)} |"
        yield ""
    yield "</div>"


def tables() -> Iterator[tuple[str, str, str, list[Option], dict[str, str]]]:
    """Yield the name of each table of a config, its title, what it is about, and its settings.

    Those of a family or of a rule have a table of their own.
    """
    sections = sections_of() | {"model": ModelConfig, "optimizer": OptimizerConfig}
    names: dict[type, list[str]] = {}
    for name, kind in tables_in(sections, arrays=True):
        names.setdefault(kind, []).append(name)
    for kind, (name, *others) in names.items():
        title = ", ".join(f"[{each}]" for each in (name, *others))
        plain = [each for each in options_of(kind, name) if table_in(each.hint) is None]
        yield name, title, section_text(kind), plain, documentation(kind)
    common = {each.name for each in options_of(ModelConfig, "model")}
    for family in OWN:
        kind = model_section(family)
        own = [each for each in options_of(kind, "model") if each.name not in common]
        title = f"[model] of {family}"
        yield (
            f"model.{family}",
            title,
            section_text(family_settings(family)),
            own,
            documentation(kind),
        )
    for rule in RULES.values():
        own, title = options_of(rule.config, "optimizer"), f"[optimizer] of {rule.name}"
        text = section_text(type(rule))
        yield f"optimizer.{rule.name}", title, text, own, documentation(rule.config)


def type_of(option: Option) -> str:
    """Return the type and the bounds of a field in words."""
    found = [f"`{form_of(option.hint).replace('{', '').replace('}', '').replace(',', '` or `')}`"]
    found += [words for mark in marks(option.hint) if (words := bounds_in_words(mark))]
    return ", ".join(found)


def marks(hint: typing.Any) -> Iterator[typing.Any]:
    """Yield what is declared beside a type, at any depth."""
    yield from getattr(hint, "__metadata__", ())
    inner = [hint.__origin__] if hasattr(hint, "__metadata__") else typing.get_args(hint)
    for each in inner:
        if not isinstance(each, str):
            yield from marks(each)


def bounds_in_words(mark: typing.Any) -> str:
    """Return what a mark asks of a number; "" for other marks."""
    if not isinstance(mark, Interval):
        return ""
    low = f"more than {mark.gt:,}" if mark.gt is not None else ""
    low = f"at least {mark.ge:,}" if mark.ge is not None else low
    high = f"at most {mark.le:,}" if mark.le not in (None, float("inf")) else ""
    return " and ".join(filter(None, (low, high)))
