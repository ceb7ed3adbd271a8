"""The `--help` of a command, from dataclasses: argparse prints it.

argparse does not parse here: it knows none of the types and bounds that fields declare.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar

from torchmars.core.bounds import KeyOf
from torchmars.core.errors import Ended, UserError
from torchmars.core.typed import (
    dotted_names,
    hint_at,
    question,
    setting_meant,
    table_in,
    without_none,
)

T = TypeVar("T")
HELP = {"-h", "--help"}
LONGEST_VALUE = 50  # columns of an option's value; a longer list of choices is part of the text


class _Place:
    """The mark of `Positional`."""


# A field that is given by its place on the command line: `run: Positional[Path]`.
Positional = Annotated[T, _Place]


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a dataclass, as the command line has it."""

    name: str
    hint: Any
    """Its type, with marks and bounds."""
    default: Any

    @property
    def kind(self) -> Any:
        """Its type without None, marks and bounds."""
        return without_none(self.hint)

    @property
    def positional(self) -> bool:
        """Whether it is given by its place."""
        return _Place in getattr(self.hint, "__metadata__", ())

    @property
    def spelled(self) -> str:
        """How messages call it: --NAME, or NAME where it is given by its place."""
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def usage(self) -> str:
        """How `--help` writes it where it is given by its place."""
        return self.spelled if self.required else f"[{self.spelled}]"


def options_of(kind: type) -> list[Option]:
    """Return the fields of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [Option(each.name, hints[each.name], each.default) for each in dataclasses.fields(kind)]


def print_help_if_asked(
    args: list[str], prog: str, *options: type, settings: type | None = None, more: str = ""
) -> None:
    """Where `args` ask for help, print it and exit with 0.

    It has the docstring of the first of the dataclasses, `more` after it, and all fields of
    `options`, as `--batch-size`. The sections that are the fields of `settings` have a line each,
    and after `--help` the name of one, or "all", asks for its fields: `--section.batch_size`,
    spelled as in a TOML file. Raises `UserError` for a section that is not there.
    """
    named, _ = help_asked(args)
    if named is None:
        return
    sections = [*sections_of(settings)]
    if settings is not None and named not in ("", "all"):
        print_sections(named, settings)
        raise Ended(0)
    documented = next(kind for kind in (*options, settings) if kind is not None)
    places = [each.usage for kind in options for each in options_of(kind) if each.positional]
    usage = [prog, *places, "[OPTION ...]", *([] if settings is None else ["[SETTING ...]"])]
    parser = argparse.ArgumentParser(
        add_help=False,
        usage=" ".join(usage).replace("%", "%%"),
        description=f"{inspect.getdoc(documented)}\n\n{textwrap.fill(more, 80)}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for kind in options:
        add_fields(parser, kind)
    parser.add_argument("-h", "--help", action="store_true", help="Print this and exit.")
    if named == "all":
        add_sections(parser, sections)
    parser.print_help()
    if sections and not named:
        print("\nsections of settings (--help SECTION prints one, --help all prints all):")
        for name, text, _ in sections:
            print(f"  {f'[{name}]':<24}{textwrap.shorten(text, 74, placeholder=' ...')}")
    raise Ended(0)


def help_asked(args: list[str]) -> tuple[str | None, list[str]]:
    """Return the word after `--help`, "" without one, and the other arguments.

    None if `args` do not ask for help.
    """
    place = next((place for place, arg in enumerate(args) if arg in HELP), None)
    if place is None:
        return None, args
    after = args[place + 1 :]
    count = 1 if after and not after[0].startswith("-") else 0
    rest = [arg for arg in [*args[:place], *after[count:]] if arg not in HELP]
    return "".join(after[:count]), rest


def print_sections(named: str, settings: type) -> None:
    """Print the settings of the section `named` and of those within it, or the one so called.

    Raises `UserError` if there is none.
    """
    sections = {each[0]: each for each in sections_of(settings)}
    section, _, setting = named.rpartition(".")
    shown = [each for name, each in sections.items() if f"{name}.".startswith(f"{named}.")]
    one = [sections[section]] if section and named in dotted_names(settings) else []
    if not shown and not one:
        above = section.split(".") if section in sections else []
        near = setting_meant(settings, above, setting)
        raise UserError(
            f"--help {named}: there is no such section: "
            + question(near, f"they are {', '.join(sections)}")
        )
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    if one and (array := table_in(hint_at(settings, named.split(".")))):
        title = f"[[{named}]], tables of a TOML file, not of the command line"
        add_fields(parser.add_argument_group(title), array, f"{named}.")
    else:
        add_sections(parser, shown or one, "" if shown else setting)
    parser.print_help()


def add_sections(
    parser: argparse.ArgumentParser, sections: list[tuple[str, str, type]], only: str = ""
) -> None:
    """Add the fields of sections, each a name, a description and a type, or `only` that field."""
    for name, text, section in sections:
        add_fields(parser.add_argument_group(f"[{name}]", text), section, f"{name}.", only)


def sections_of(settings: type | None) -> Iterator[tuple[str, str, type]]:
    """Yield the name, description and type of each section of settings.

    A section comes before those within it.
    """
    if settings is None:
        return
    texts = documentation(settings)
    for section in options_of(settings):
        kind: type = section.kind
        name = section.name
        if dataclasses.is_dataclass(kind):
            yield name, texts.get(name) or inspect.getdoc(kind) or "", kind
            for inner, text, each in sections_of(kind):
                yield f"{name}.{inner}", text, each


def add_fields(
    group: "argparse._ActionsContainer", kind: type, prefix: str = "", only: str = ""
) -> None:
    """Add the fields of a dataclass, or `only` that one, except sections and arrays of tables."""
    texts = documentation(kind)
    for each in options_of(kind):
        if table_in(each.hint) is not None or only not in ("", each.name):
            continue
        text, value = texts.get(each.name, ""), metavar(each.hint)
        if len(value) > LONGEST_VALUE:
            text, value = f"One of {value.strip('{}').replace(',', ', ')}. {text}", "TEXT"
        flag = each.kind is bool and not prefix
        if "Default: " not in text and not flag and (default := default_text(each)):
            text = f"{text} Default: {default}."
        shown: dict[str, Any] = {"help": text.replace("%", "%%")}
        if each.positional:
            group.add_argument(each.name, metavar=each.usage, **shown)
        elif flag:
            group.add_argument(each.spelled, action="store_true", **shown)
        else:
            name = f"--{prefix}{each.name}" if prefix else each.spelled
            group.add_argument(name, metavar=value, **shown)


def documentation(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, and of those that it derives from.

    A field that is not written down in the class has its text in its metadata, as "help".
    """
    texts = {each.name: each.metadata.get("help", "") for each in dataclasses.fields(kind)}
    for owner in reversed(kind.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        body = typing.cast(ast.ClassDef, tree.body[0]).body
        for field, below in zip(body, body[1:]):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


def metavar(hint: Any) -> str:
    """Return the placeholder of an option's value, as TOML spells it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        tables = [mark.table for mark in hint.__metadata__ if isinstance(mark, KeyOf)]
        return "{" + ",".join(tables[0]) + "}" if tables else metavar(hint.__origin__)
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin in (typing.Union, types.UnionType):
        values = [metavar(each) for each in args if each is not type(None)]
        return "|".join(values).replace("}|{", ",")
    if origin is list or ... in args:
        return f"{metavar(args[0])} ..."
    if origin is tuple:
        return " ".join(metavar(each) for each in args)
    return {bool: "{true,false}", int: "INT", float: "FLOAT", Path: "PATH", PurePath: "PATH"}.get(
        hint, "TEXT"
    )


def default_text(option: Option) -> str:
    """Return a field's default as TOML spells it, or nothing if it has no default worth showing."""
    value = option.default
    if option.required or value is None or value == "":
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)
