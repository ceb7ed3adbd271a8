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
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Any, NoReturn, TypeVar

from torchmars.core.check import form_of, kind_of, make, meant, nearest, read_words, table_in
from torchmars.core.console import say, write
from torchmars.core.errors import Ended, UserError, file_errors
from torchmars.core.files import write_durably

T = TypeVar("T")
Sections = Mapping[str, type]  # of settings, by name
NO_SECTIONS: Sections = {}
WIDEST = 98  # columns of a title or a description of a section, beside its indent
VALUE = "\0"  # before a word that begins with -, so that argparse takes it for a value
COMMAND_LINE = "on the command line"
PLACE = "given by its place"
# A field that is given by its place on the command line: `run: Positional[Path]`.
Positional = Annotated[T, PLACE]


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
        return kind_of(self.hint)

    @property
    def positional(self) -> bool:
        """Whether it is given by its place."""
        return PLACE in getattr(self.hint, "__metadata__", ())

    @property
    def spelled(self) -> str:
        """How messages call it: --NAME, or NAME where it is given by its place."""
        if self.positional:
            return self.name.upper()
        return f"--{self.name}" if self.setting else f"--{self.name.replace('_', '-')}"

    def text(self, documented: str) -> str:
        """Return its help: what its field says, and its default as TOML spells it."""
        value = self.default
        if not documented or "Default: " in documented or value in (MISSING, None, ""):
            return documented
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"{documented} Default: {shown.lower() if isinstance(value, bool) else shown}."

    def value(self, given: Any) -> Any:
        """Return the value of its words, or of a flag. Settings are checked later, all together.

        Raises `UserError`.
        """
        if given is True:
            return given
        words = given if isinstance(given, list) else [given]
        found = read_words([each.removeprefix(VALUE) for each in words], self.hint, self.spelled)
        if self.setting or isinstance(found, (PurePath, list)):  # a list is of paths
            return found
        return make(self.hint, found, name=self.spelled)


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


def parse(
    kind: type[T], args: Sequence[str], prog: str, sections: Sections = NO_SECTIONS, about: str = ""
) -> tuple[T, dict[str, Any]]:
    """Return the dataclass `kind` with the fields that a command line gives, and other settings.

    A `Positional` field is given by its place, the others as `--name value`, `--name=value`, or
    `--name` for a bool; settings of `sections` as `--section.name`. `--help` prints the help, with
    `about`, and exits. After it the name of a section, of a setting, or "all" asks for more. Raises
    `UserError`.
    """
    own = {each.name: each for each in options_of(kind)}
    options = own | settings_in(sections)
    parser = Parser(
        usage=usage_of(kind, prog, sections),
        add_help=False,
        allow_abbrev=False,  # else --training.step is taken for --training.steps
        argument_default=argparse.SUPPRESS,
    )
    parser.known = [each.spelled[2:] for each in options.values() if not each.positional]
    add_options(parser, options.values(), {})
    ask = partial(print_help, kind, prog, sections, about)
    parser.add_argument("-h", "--help", nargs="?", const="", type=ask)
    found = vars(parser.parse_args([*map(prepared, args)]))
    values = {name: options[name].value(given) for name, given in found.items()}
    mine = {name: values.pop(name) for name in own.keys() & values}
    return kind(**mine), values


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`, with what was meant or what may be written."""

    known: Sequence[str] = ()
    """The names of its options."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a command line."""
        message, remedy = message.replace(VALUE, ""), "see --help"
        if message.startswith("unrecognized"):
            name = message.split()[2].partition("=")[0]
            if name in ("--gpus", "--ngpu", "--nproc-per-node"):
                remedy = "NGPU=2 torchmars train ... says how many"
            elif name.startswith("--") and (near := nearest(name[2:], self.known)):
                remedy = f"did you mean --{near}?"
        elif self.usage and "required" in message:
            runs = [str(file.parent) for file in Path("runs").glob("*/config.toml")]
            run = runs[0] if len(runs) == 1 else "runs/NAME"
            remedy = f"write {re.sub('RUNS?|FOLDER|MODEL', run, self.usage)}"
        raise UserError(f"{message}: {remedy}")


def usage_of(kind: type, prog: str, sections: Sections) -> str:
    """Return what a command line consists of."""
    needed = [each for each in options_of(kind) if each.positional or each.default is MISSING]
    shown = [each.spelled if each.default is MISSING else f"[{each.spelled}]" for each in needed]
    return " ".join([prog, *shown, "[OPTION ...]", *(["[SETTING ...]"] if sections else [])])


def prepared(arg: str) -> str:
    """Return an argument as the parser wants it: - is _ in settings, and - in options."""
    name, equals, value = arg.partition("=")
    if not arg.startswith("--"):
        return VALUE + arg if arg.startswith("-") and arg != "-h" else arg
    old, new = ("-", "_") if "." in name else ("_", "-")
    return f"--{name[2:].replace(old, new)}{equals}{value}"


def taken(args: Sequence[str], kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments that are a command's own options, with their words, and the others."""
    own = {each.spelled: each for each in options_of(kind)}
    mine: list[str] = []
    rest: list[str] = []
    left = iter(args)
    for arg in left:
        name, equals, _ = arg.partition("=")
        option = own.get(name.replace("_", "-"))
        (mine if option else rest).append(arg)
        if option and not equals and option.kind is not bool:
            mine.extend(islice(left, 1))
    return mine, rest


def add_options(
    group: "argparse._ActionsContainer", options: Iterable[Option], texts: Mapping[str, str]
) -> None:
    """Add options to a parser, each with its text; one without any is not shown."""
    for each in options:
        text = texts.get(each.name.rpartition(".")[2], "")
        value, flag = form_of(each.hint), each.kind is bool and not each.setting
        text = text if flag else each.text(text)
        shown: dict[str, Any] = {"help": text.replace("%", "%%") or argparse.SUPPRESS}
        many = {list: "*", tuple: "+"}.get(typing.get_origin(each.kind))
        required = each.default is MISSING
        if each.positional:
            nargs = "+" if many else None if required else "?"
            group.add_argument(each.name, nargs=nargs, metavar=each.spelled, **shown)
        elif flag:
            group.add_argument(each.spelled, dest=each.name, action="store_true", **shown)
        else:
            shown |= {"required": required and not each.setting}
            shown |= {"nargs": "?", "const": "true"} if each.kind is bool else {}
            shown |= {"nargs": many, "metavar": value.split()[0]} if many else {"metavar": value}
            group.add_argument(each.spelled, dest=each.name, **shown)


def print_help(kind: type, prog: str, sections: Sections, about: str, named: str) -> NoReturn:
    """Print the help of a command with the options `kind`, or of what is `named` in `sections`.

    Raises `UserError` if there is nothing of that name, else `Ended`.
    """
    whole = named in ("", "all") or not sections
    parser = argparse.ArgumentParser(
        add_help=False,
        usage=usage_of(kind, prog, sections) if whole else argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole:
        parser.description = f"{inspect.getdoc(kind)}\n\n{textwrap.fill(about, 80)}".strip()
        add_options(parser, options_of(kind), documentation(kind))
        parser.add_argument("-h", "--help", action="store_true", help="Print this and exit.")
    shown: dict[type, str] = {}  # the roles of the optimizer have one type
    for name, its in tables_in(sections, arrays=named not in ("", "all")):
        chosen = [
            each
            for each in options_of(its, name)
            if table_in(each.hint) is None and (whole or f"{each.name}.".startswith(f"{named}."))
        ]
        if named and chosen and its not in shown:
            group = parser.add_argument_group(f"[{name}]", section_text(its))
            add_options(group, chosen, documentation(its))
        if chosen:
            shown.setdefault(its, name)
    if sections and not shown:
        tables = dict(tables_in(sections))
        remedy = meant(named, [*settings_in(sections), *tables], f"they are {', '.join(tables)}")
        raise UserError(f"--help {named}: there is no such section: {remedy}")
    write(parser.format_help())
    if sections and not named:
        say("\nsections of settings (--help SECTION prints one, --help all prints all):")
        for its, name in shown.items():
            text = textwrap.shorten(section_text(its), 74, placeholder=" ...")
            say(f"  {f'[{name}]':<24}{text}")
    raise Ended(0)


def section_text(kind: type) -> str:
    """Return what a section is, in a paragraph."""
    return textwrap.fill((inspect.getdoc(kind) or "").partition("\n\n")[0], WIDEST)


@cache
def documentation(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, and of those that it derives from."""
    texts: dict[str, str] = {}
    kinds = (*vars(kind).get("documented_by", ()), kind)
    for owner in (each for one in kinds for each in reversed(one.__mro__[:-1])):
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        body = found.body if isinstance(found, ast.ClassDef) else []
        for field, below in zip(body, body[1:]):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


def words(text: str, option: str) -> list[str]:
    """Return the words between commas. Raises `UserError` if one is empty."""
    found = [word.strip() for word in text.split(",")]
    if "" in found:
        raise UserError(f"{option} needs a word on each side of a comma, got {text!r}")
    return found


def write_results(file: Path, found: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises `UserError`."""
    with file_errors(f"--json: cannot write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps(found, indent=2) + "\n")
