"""Command lines: argparse parses and prints what dataclasses declare.

A command's own options are a dataclass, spelled `--batch-size`. Settings of a run are sections of
dataclasses, spelled as in a TOML file: `--section.batch_size`.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import shlex
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from torchmars.core.check import (
    bare_type,
    form_of,
    meant,
    nearest,
    read_words,
    table_in,
)
from torchmars.core.errors import Ended, UserError, file_errors
from torchmars.core.files import path_problem, write_durably

T = TypeVar("T")
Sections = Mapping[str, type]  # of settings, by name
WIDEST = 98  # columns of a title or a description of a section, beside its indent
LONGEST_VALUE = 50  # columns of an option's value; a longer list of choices is part of the text
VALUE = "\0"  # before a word that begins with -, so that argparse takes it for a value
COMMAND_LINE = "on the command line"


class _Place:
    """The mark of `Positional`."""


# A field that is given by its place on the command line: `run: Positional[Path]`.
Positional = Annotated[T, _Place]


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a dataclass, as the command line has it."""

    name: str
    """As a TOML file has it; of a setting with its section."""
    hint: Any
    """Its type, with marks and bounds."""
    default: Any
    setting: bool = False

    @property
    def kind(self) -> Any:
        """Its type without None, marks and bounds."""
        return bare_type(self.hint)

    @property
    def positional(self) -> bool:
        """Whether it is given by its place."""
        return _Place in getattr(self.hint, "__metadata__", ())

    @property
    def spelled(self) -> str:
        """How messages call it: --NAME, or NAME where it is given by its place."""
        if self.positional:
            return self.name.upper()
        return f"--{self.name}" if self.setting else f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    def shown_default(self) -> str:
        """Return the default as TOML spells it, or nothing if it has none worth showing."""
        value = self.default
        if self.required or value is None or value == "":
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return repr(value) if isinstance(value, str) and not value.strip() else str(value)

    def value(self, words: list[str]) -> Any:
        """Return the value of its words. Raises `UserError`."""
        if len(words) > 1 and typing.get_origin(self.kind) not in (list, tuple):
            raise UserError(f"cannot read the argument {words[1]!r}: see --help")
        name, where = (self.name, COMMAND_LINE) if self.setting else (self.spelled, "")
        return read_words(words, self.hint, name, where)


def options_of(kind: type, section: str = "") -> list[Option]:
    """Return the fields of a dataclass, which may be a section of settings."""
    hints = typing.get_type_hints(kind, include_extras=True)
    above = f"{section}." if section else ""
    return [
        Option(above + each.name, hints[each.name], each.default, bool(section))
        for each in dataclasses.fields(kind)
    ]


def tables_in(sections: Sections, arrays: bool = False) -> Iterator[tuple[str, type]]:
    """Yield the name and the type of each section, and of the tables within it after it.

    Also those of `arrays`, which are in TOML files alone.
    """
    for name, kind in sections.items():
        yield name, kind
        for each in options_of(kind, name):
            if (inner := table_in(each.hint)) and (arrays or inner is each.kind):
                yield from tables_in({each.name: inner}, arrays)


def settings_in(sections: Sections) -> dict[str, Option]:
    """Return the settings of sections by dotted names, without tables."""
    found = (each for name, kind in tables_in(sections) for each in options_of(kind, name))
    return {each.name: each for each in found if table_in(each.hint) is None}


def parse(kind: type[T], args: Sequence[str], prog: str) -> T:
    """Return the dataclass `kind` with the fields that a command line gives.

    A `Positional` field is given by its place, the others as `--name value`, `--name=value`, or
    `--name` for a bool. `--help` prints the help and exits. Raises `UserError`.
    """
    return parse_all(kind, args, prog, {})[0]


def parse_all(
    kind: type[T], args: Sequence[str], prog: str, sections: Sections, about: str = ""
) -> tuple[T, dict[str, Any]]:
    """Return what `parse` does, and the settings of `sections` that a command line gives.

    `--help` has `about` too. After it the name of a section, of a setting, or "all" asks for more.
    """
    own = {each.name: each for each in options_of(kind)}
    options = own | settings_in(sections)
    words = words_in(args, options, sections)
    if "--help" in words:
        print_help(kind, prog, sections, "".join(words["--help"]) if sections else "", about)
        raise Ended(0)
    for each in own.values():
        if each.required and each.name not in words:
            known = [word for one in own.values() if one.positional for word in example(one, words)]
            remedy = f"write {prog} {shlex.join(known)}" if each.positional else form_of(each.hint)
            raise UserError(f"{each.spelled} is missing: {remedy}")
    values = {
        name: given if isinstance(given, bool) else options[name].value(given)
        for name, given in words.items()
    }
    mine = {name: values.pop(name) for name in own.keys() & values}
    return kind(**mine), values


def words_in(
    args: Sequence[str], options: Mapping[str, Option], sections: Sections
) -> dict[str, Any]:
    """Return the words of each option that a command line gives, by its name; True for a flag.

    Raises `UserError` for what is none of them.
    """
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,  # else --training.step is taken for --training.steps
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    add_options(parser, options.values(), {})
    parser.add_argument("--help", dest="--help", nargs="?", const="")
    try:
        found, left = parser.parse_known_intermixed_args([*map(prepared, args)])
    except argparse.ArgumentError as error:
        spelled = {each.spelled: each for each in options.values()}
        named = spelled.get(error.argument_name or "")
        wanted = f"{named.spelled} needs a value: {form_of(named.hint)}" if named else str(error)
        raise UserError(wanted) from None
    for word in left:
        if not word.startswith("--"):
            raise UserError(f"cannot read the argument {word.removeprefix(VALUE)!r}: see --help")
        raise unknown_option(word.partition("=")[0], options, sections)
    words: dict[str, Any] = {}
    for name, given in vars(found).items():
        many = given if isinstance(given, list) else [] if given is None else [given]
        if given is True:
            words[name] = given
        elif many or not options[name].positional:
            words[name] = [each.removeprefix(VALUE) for each in many]
    return words


def is_option(arg: str) -> bool:
    """Return whether an argument names an option; a value may begin with -- too."""
    return arg.startswith("--") and not re.search(r"\s", arg.partition("=")[0])


def prepared(arg: str) -> str:
    """Return an argument as the parser wants it: - is _ in settings, and - in options."""
    name, equals, value = arg.partition("=")
    if arg == "-h":
        return "--help"
    if not is_option(arg):
        return VALUE + arg if arg.startswith("-") else arg
    old, new = ("-", "_") if "." in name else ("_", "-")
    return f"--{name[2:].replace(old, new)}{equals}{value}"


def unknown_option(name: str, options: Mapping[str, Option], sections: Sections) -> UserError:
    """Return the error of an option that there is not, with the one that was meant."""
    if name in ("--gpus", "--ngpu", "--nproc-per-node"):
        return UserError(f"unknown option {name}: NGPU=2 torchmars train ... says how many")
    known = [each.spelled[2:] for each in options.values() if not each.positional]
    near = nearest(name[2:], known)
    if name[2:] in sections:
        near = next(each for each in known if each.startswith(f"{name[2:]}."))
    remedy = f"did you mean --{near}?" if near else "see --help"
    return UserError(f"unknown option {name}: {remedy}")


def example(option: Option, words: Mapping[str, list[str]]) -> list[str]:
    """Return the words of an option given by its place, or one: of a run the only one here."""
    if option.name in words:
        return words[option.name]
    if option.name in ("run", "runs", "folder", "model"):
        found = [file.parent for file in Path("runs").glob("*/config.toml")]
        return [str(found[0]) if len(found) == 1 else "runs/NAME"]
    form = form_of(option.hint)
    return [form.strip("{}").partition(",")[0] if form.startswith("{") else option.spelled]


def taken(args: Sequence[str], kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments that are a command's own options, with their words, and the others."""
    own = {each.spelled: each for each in options_of(kind)}
    mine: list[str] = []
    rest: list[str] = []
    left = [*args]
    while left:
        name, equals, _ = (arg := left.pop(0)).partition("=")
        option = own.get(name.replace("_", "-"))
        count = 0 if option is None or equals or option.kind is bool else 1
        (rest if option is None else mine).extend([arg, *left[:count]])
        del left[:count]
    return mine, rest


def grouped(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option of a command line, as it is written, with the words after it."""
    found: list[tuple[str, list[str]]] = []
    for arg in args:
        if is_option(arg):
            name, equals, value = arg.partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(arg)
    return found


def add_options(
    group: "argparse._ActionsContainer", options: Iterable[Option], texts: Mapping[str, str]
) -> None:
    """Add options to a parser, each with its text; one without any is not shown."""
    for each in options:
        text, value = texts.get(each.name.rpartition(".")[2], ""), form_of(each.hint)
        if len(value) > LONGEST_VALUE:
            text, value = f"One of {value.strip('{}').replace(',', ', ')}. {text}", "TEXT"
        flag = each.kind is bool and not each.setting
        if text and "Default: " not in text and not flag and (default := each.shown_default()):
            text = f"{text} Default: {default}."
        shown: dict[str, Any] = {"help": text.replace("%", "%%") or argparse.SUPPRESS}
        many = {list: "*", tuple: "+"}.get(typing.get_origin(each.kind))
        if each.positional:
            usage = each.spelled if each.required else f"[{each.spelled}]"
            group.add_argument(each.name, nargs=many or "?", metavar=usage, **shown)
        elif flag:
            group.add_argument(each.spelled, dest=each.name, action="store_true", **shown)
        else:
            value = value.split()[0] if many else value
            switch = {"nargs": "?", "const": "true"} if each.kind is bool else {"nargs": many}
            group.add_argument(each.spelled, dest=each.name, metavar=value, **switch, **shown)


def print_help(kind: type, prog: str, sections: Sections, named: str, about: str) -> None:
    """Print the help of a command with the options `kind`, or of what is `named` in `sections`.

    Raises `UserError` if there is nothing of that name.
    """
    places = [each for each in options_of(kind) if each.positional]
    usage = [prog, *(each.spelled if each.required else f"[{each.spelled}]" for each in places)]
    usage += ["[OPTION ...]", *(["[SETTING ...]"] if sections else [])]
    whole = named in ("", "all")
    parser = argparse.ArgumentParser(
        add_help=False,
        usage=" ".join(usage) if whole else argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole:
        parser.description = f"{inspect.getdoc(kind)}\n\n{textwrap.fill(about, 80)}".strip()
        add_options(parser, options_of(kind), documentation(kind))
        parser.add_argument("-h", "--help", action="store_true", help="Print this and exit.")
    if named:
        add_sections(parser, sections, "" if whole else named)
    parser.print_help()
    if sections and not named:
        print("\nsections of settings (--help SECTION prints one, --help all prints all):")
        names: dict[type, str] = {}  # the roles of the optimizer have one type
        for name, its in tables_in(sections):
            if names.setdefault(its, name) == name:
                text = textwrap.shorten(section_text(its), 74, placeholder=" ...")
                print(f"  {f'[{name}]':<24}{text}")


def add_sections(parser: argparse.ArgumentParser, sections: Sections, named: str) -> None:
    """Add a group for each table of settings, of those whose names begin with what is `named`.

    The roles of the optimizer have one type, and one group. Raises `UserError` if none does.
    """
    groups = dict[type, argparse._ArgumentGroup]()
    for name, kind in tables_in(sections, arrays=bool(named)):
        options = [
            each
            for each in options_of(kind, name)
            if table_in(each.hint) is None and f"{each.name}.".startswith(f"{named}." * bool(named))
        ]
        if options and kind not in groups:
            groups[kind] = parser.add_argument_group(f"[{name}]", section_text(kind))
            add_options(groups[kind], options, documentation(kind))
    if not groups:
        listed = f"they are {', '.join(dict(tables_in(sections)))}"
        remedy = meant(named, [*settings_in(sections), *dict(tables_in(sections))], listed)
        raise UserError(f"--help {named}: there is no such section: {remedy}")


def section_text(kind: type) -> str:
    """Return what a section is, in a paragraph."""
    return textwrap.fill((inspect.getdoc(kind) or "").partition("\n\n")[0], WIDEST)


@cache
def documentation(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, and of those that it derives from."""
    texts: dict[str, str] = {}
    for other in vars(kind).get("documented_by", ()):
        texts |= documentation(other)
    for owner in reversed(kind.__mro__[:-1]):
        body = classes_of(inspect.getfile(owner)).get(owner.__qualname__.split(".")[-1], [])
        for field, below in zip(body, body[1:]):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


@cache
def classes_of(file: str) -> dict[str, list[ast.stmt]]:
    """Return the bodies of the classes of a Python file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def words(text: str, option: str) -> list[str]:
    """Return the words between commas. Raises `UserError` if one is empty."""
    found = [word.strip() for word in text.split(",")]
    if "" in found:
        raise UserError(
            f"{option}: there is nothing between two commas, or nothing at all: {text!r}"
        )
    return found


def check_results_file(file: Path | None) -> None:
    """Raise `UserError` if the file of `--json` cannot be written, before the work begins."""
    wrong = path_problem(file, "file") if file else ""
    if file and not file.absolute().parent.is_dir():
        wrong = "its folder does not exist"
    if wrong:
        raise UserError(f"--json: cannot write {file}: {wrong}")


def write_results(file: Path, found: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises `UserError`."""
    with file_errors(f"--json: cannot write {file}"):
        write_durably(file, json.dumps(found, indent=2) + "\n")
