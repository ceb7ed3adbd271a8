"""Command lines: argparse parses and prints what dataclasses declare.

A command's own options are a dataclass, spelled `--batch-size`. Settings of a run are sections of
dataclasses, spelled as in a TOML file: `--section.batch_size`.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import shlex
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from torchmars.core.check import (
    bare_type,
    form_of,
    make,
    nearest,
    question,
    read_words,
    table_in,
)
from torchmars.core.errors import Ended, UserError, file_errors
from torchmars.core.files import name_problem, path_problem, write_durably
from torchmars.core.places import place

T = TypeVar("T")
HELP = {"-h", "--help"}
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


def options_of(kind: type, section: str = "") -> list[Option]:
    """Return the fields of a dataclass, which may be a section of settings."""
    hints = typing.get_type_hints(kind, include_extras=True)
    above = f"{section}." if section else ""
    return [
        Option(above + each.name, hints[each.name], each.default, bool(section))
        for each in dataclasses.fields(kind)
    ]


def sections_in(sections: Mapping[str, type]) -> Iterator[tuple[str, type]]:
    """Yield the name and the type of each section, and of those within it after it."""
    for name, kind in sections.items():
        yield name, kind
        inner: dict[str, Any] = {each.name: each.kind for each in options_of(kind, name)}
        yield from sections_in({n: inner[n] for n in inner if dataclasses.is_dataclass(inner[n])})


def settings_in(sections: Mapping[str, type]) -> dict[str, Option]:
    """Return the settings of sections by dotted names, without arrays of tables."""
    return {
        each.name: each
        for name, kind in sections_in(sections)
        for each in plain_options(kind, name)
    }


def plain_options(kind: type, section: str) -> list[Option]:
    """Return the settings of a section but for those that are tables."""
    return [each for each in options_of(kind, section) if table_in(each.hint) is None]


def parser_of(
    own: Sequence[type], sections: Mapping[str, type], *, texts: bool = False, **more: Any
) -> argparse.ArgumentParser:
    """Return a parser of a command's own options and of settings, each with its words.

    With `texts` it can print their help. `more` are arguments of argparse.
    """
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,  # else --training.step is taken for --training.steps
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    for kind in own:
        add_options(parser, options_of(kind), documentation(kind) if texts else {})
    if texts and own:
        parser.add_argument("-h", "--help", action="store_true", help="Print this and exit.")
    for name, others, kind in once(sections) if texts else ():
        also = ", ".join(f"[{each}]" for each in others)
        title = textwrap.fill(f"[{name}]{also and f', and as well {also}'}", WIDEST)
        group = parser.add_argument_group(title, section_text(kind))
        add_options(group, plain_options(kind, name), documentation(kind))
    if not texts:
        add_options(parser, [*settings_in(sections).values()], {})
    return parser


def once(sections: Mapping[str, type]) -> Iterator[tuple[str, list[str], type]]:
    """Yield the first of all sections that have one type, the names of the others, and the type.

    The roles of the optimizer have one.
    """
    found = [*sections_in(sections)]
    for name, kind in found:
        first, *others = [each for each, its in found if its is kind]
        if name == first:
            yield name, others, kind


def add_options(
    group: "argparse._ActionsContainer", options: list[Option], texts: Mapping[str, str]
) -> None:
    """Add options to a parser, each with its text."""
    for each in options:
        text, value = texts.get(each.name.rpartition(".")[2], ""), form_of(each.hint)
        if len(value) > LONGEST_VALUE:
            text, value = f"One of {value.strip('{}').replace(',', ', ')}. {text}", "TEXT"
        flag = each.kind is bool and not each.setting
        if "Default: " not in text and not flag and (default := each.shown_default()):
            text = f"{text} Default: {default}."
        shown: dict[str, Any] = {"help": text.replace("%", "%%")}
        many = {list: "*", tuple: "+"}.get(typing.get_origin(each.kind))
        if each.positional:
            usage = each.spelled if each.required else f"[{each.spelled}]"
            group.add_argument(each.name, nargs=many or "?", metavar=usage, **shown)
        elif flag:
            group.add_argument(each.spelled, action="store_true", **shown)
        else:
            value = value.split()[0] if many else value
            switch = {"nargs": "?", "const": "true"} if each.kind is bool else {"nargs": many}
            group.add_argument(each.spelled, dest=each.name, metavar=value, **switch, **shown)


def words_in(
    args: Sequence[str], own: Sequence[type], sections: Mapping[str, type]
) -> dict[str, Any]:
    """Return the words of each option and setting that a command line gives, by its name.

    Raises `UserError` for what is none of them.
    """
    parser = parser_of(own, sections)
    options = {each.name: each for kind in own for each in options_of(kind)}
    options |= settings_in(sections)
    try:
        found, left = parser.parse_known_intermixed_args([*map(prepared, args)])
    except argparse.ArgumentError as error:
        spelled = {each.spelled: each for each in options.values()}
        named = spelled.get(error.argument_name or "")
        wanted = f"{named.spelled} needs a value: {form_of(named.hint)}" if named else str(error)
        raise UserError(wanted) from None
    for arg in left:
        word = arg.removeprefix(VALUE)
        if not word.startswith("--"):
            raise UserError(f"cannot read the argument {word!r}: see --help")
        raise unknown_option(word.partition("=")[0], own, sections)
    words: dict[str, Any] = {}
    for name, given in vars(found).items():
        many = given if isinstance(given, list) else [] if given is None else [given]
        if many or not options[name].positional:
            words[name] = given if given is True else [each.removeprefix(VALUE) for each in many]
    return words


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
        if arg.startswith("--"):
            found.append((arg, []))
        elif found:
            found[-1][1].append(arg)
    return found


def prepared(arg: str) -> str:
    """Return an argument as the parser wants it: - is _ in settings, and - in options."""
    name, equals, value = arg.partition("=")
    if not name.startswith("--"):
        return VALUE + arg if arg.startswith("-") else arg
    old, new = ("-", "_") if "." in name else ("_", "-")
    return f"--{name[2:].replace(old, new)}{equals}{value}"


def unknown_option(name: str, own: Sequence[type], sections: Mapping[str, type]) -> UserError:
    """Return the error of an option that there is not, with the one that was meant."""
    known = [each.spelled[2:] for kind in own for each in options_of(kind) if not each.positional]
    settings = settings_in(sections)
    if name in ("--gpus", "--ngpu", "--nproc-per-node"):
        return UserError(f"unknown option {name}: NGPU=2 torchmars train ... says how many")
    near = nearest(name[2:], [*known, *settings])
    if name[2:] in sections:
        near = next(each for each in settings if each.startswith(f"{name[2:]}."))
    return UserError(f"unknown option {name}: {question('--' * bool(near) + near) or 'see --help'}")


def parse(kind: type[T], args: list[str], prog: str) -> T:
    """Return the dataclass `kind` with the fields that a command line gives.

    A `Positional` field is given by its place, the others as `--name value`, `--name=value`, or
    `--name` for a bool. `--help` prints the help and exits. Raises `UserError`.
    """
    print_help_if_asked(args, prog, kind)
    given = words_in(args, [kind], {})
    places = [each for each in options_of(kind) if each.positional]
    missing = next((each for each in places if each.required and each.name not in given), None)
    if missing is not None:
        write = [word for each in places for word in given.get(each.name, [example_of(each)])]
        raise UserError(f"{missing.spelled} is missing: write {prog} {shlex.join(write)}")
    return build(kind, given)


def example_of(option: Option) -> str:
    """Return a word for an option given by its place: of a run the only one that is here."""
    if option.name not in ("run", "runs", "folder", "model"):
        return option.spelled
    found = [file.parent for file in Path("runs").glob("*/config.toml")]
    return str(found[0]) if len(found) == 1 else "runs/NAME"


def build(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a `kind` of the words `given`, by field. Raises `UserError`."""
    values: dict[str, Any] = {}
    for each in options_of(kind):
        if each.name not in given:
            if each.required:
                raise UserError(f"{each.spelled} is missing: {form_of(each.hint)}, see --help")
            continue
        words = given[each.name]
        values[each.name] = words if words is True else value_of(each, words)
    return kind(**values)


def value_of(option: Option, words: list[str]) -> Any:
    """Return the value of an option's words. Raises `UserError`.

    A `Path` is local, a `PurePath` may also be in a store.
    """
    kind = option.kind
    if len(words) > 1 and typing.get_origin(kind) not in (list, tuple):
        raise UserError(f"cannot read the argument {words[1]!r}: see --help")
    many = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if many else kind
    if kind not in (Path, PurePath) or words in ([], ["none"]):
        where = COMMAND_LINE if option.setting else ""
        name = option.name if option.setting else option.spelled
        return read_words(words, option.hint, name, where)
    paths = [path_of(text, option.spelled, kind is PurePath) for text in words]
    return paths if many else paths[0]


def path_of(text: str, name: str, stores: bool) -> PurePath:
    """Return the path that a word of the command line is. Raises `UserError`."""
    path = place(text, name, stores)
    make(str, text.encode(errors="replace").decode(), name=name)
    if wrong := name_problem(path):
        raise UserError(f"{name}: {path} cannot be a path ({wrong}): choose another one")
    return path


def print_help_if_asked(
    args: list[str],
    prog: str,
    *own: type,
    sections: Mapping[str, type] | None = None,
    more: str = "",
) -> None:
    """Where `args` ask for help, print it and exit with 0.

    It has the docstring of the first of the dataclasses, `more` after it, and all their fields.
    The sections of settings have a line each, and after `--help` the name of one, of a setting, or
    "all" asks for more. Raises `UserError` for a section that is not there.
    """
    named, _ = help_asked(args)
    if named is None:
        return
    sections = sections or {}
    if named not in ("", "all"):
        print_sections(named, sections)
        raise Ended(0)
    places = [each for kind in own for each in options_of(kind) if each.positional]
    usage = [prog, *(each.spelled if each.required else f"[{each.spelled}]" for each in places)]
    usage += ["[OPTION ...]", *(["[SETTING ...]"] if sections else [])]
    about = [inspect.getdoc(own[0]) or ""] if own else []
    parser_of(
        own,
        sections if named else {},
        texts=True,
        usage=" ".join(usage).replace("%", "%%"),
        description="\n\n".join([*about, textwrap.fill(more, 80)]).strip(),
    ).print_help()
    if sections and not named:
        print("\nsections of settings (--help SECTION prints one, --help all prints all):")
        for name, others, kind in once(sections):
            also = "".join(f"{each.rpartition('.')[2]}, " for each in others)
            text = f"Also {also[:-2]}: {section_text(kind)}" if others else section_text(kind)
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


def print_sections(named: str, sections: Mapping[str, type]) -> None:
    """Print the settings of the section `named` and of those within it, or the one so called.

    Raises `UserError` if there is none.
    """
    known, settings = dict(sections_in(sections)), settings_in(sections)
    if named in known:
        parser_of((), {named: known[named]}, texts=True, usage=argparse.SUPPRESS).print_help()
        return
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    section = named.rpartition(".")[0]
    owner = known.get(section)
    fields = {each.name: each for each in options_of(owner, section)} if owner else {}
    if owner is None or named not in fields:
        near = question(nearest(named, [*settings, *known]))
        listed = f"hey are {', '.join(known)}"
        raise UserError(
            f"--help {named}: there is no such section: " + (f"{near} T" if near else "t") + listed
        )
    if (array := table_in(fields[named].hint)) is None:
        group = parser.add_argument_group(f"[{section}]", section_text(owner))
        add_options(group, [fields[named]], documentation(owner))
    else:
        title = f"[[{named}]], tables of a TOML file, not of the command line"
        group = parser.add_argument_group(title)
        add_options(group, options_of(array, named), documentation(array))
    parser.print_help()


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


def check_suffix(out: Path, suffixes: tuple[str, ...], else_be: str = "") -> None:
    """Raise `UserError` if the file of `--out` does not end in one of `suffixes`.

    `else_be` is another possible meaning, if there is one.
    """
    if out.suffix.lower() not in suffixes:
        also = else_be and f", or be {else_be}"
        raise UserError(f"--out: {out} must end in {' or '.join(suffixes)}{also}")


def check_results_file(file: Path | None) -> None:
    """Raise `UserError` if the file of `--json` cannot be written, before the work begins."""
    if file is None:
        return
    wrong = path_problem(file, "file")
    if not file.absolute().parent.is_dir():
        wrong = "its folder does not exist"
    if wrong:
        raise UserError(f"--json: cannot write {file}: {wrong}")


def write_results(file: Path, found: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises `UserError`."""
    with file_errors(f"--json: cannot write {file}"):
        write_durably(file, json.dumps(found, indent=2) + "\n")
