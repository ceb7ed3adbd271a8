"""A command's own options, from a dataclass; files of results that options name."""

import json
import typing
from pathlib import Path, PurePath
from typing import Any, TypeVar

from torchmars.core.console import say
from torchmars.core.errors import Ended, UserError, file_errors
from torchmars.core.files import name_problem, path_problem, write_durably
from torchmars.core.help import options_of, print_help_if_asked
from torchmars.core.places import place
from torchmars.core.tables import table
from torchmars.core.typed import describe, make, meant, nearest, read_words, without_none

T = TypeVar("T")


def parse(kind: type[T], args: list[str], prog: str) -> T:
    """Return the dataclass `kind` with the fields that a command line gives.

    A `Positional` field is given by its place, the others as `--name value`,
    `--name=value`, or `--name` for a bool. A list in the last place takes all that is left, at
    least one. `--help` prints the help and exits. Raises `UserError`.
    """
    print_help_if_asked(args, prog, kind)
    values, rest = read_options(kind, args)
    options = options_of(kind)
    for arg in rest:
        if arg.startswith("--"):
            known = [each.spelled for each in options if not each.positional]
            name = arg.partition("=")[0]
            raise UserError(f"unknown option {name}: {meant(name, known) or 'see --help'}".strip())
    places = [each for each in options if each.positional]
    taken = 0
    for index, each in enumerate(places[: len(rest)]):
        many = typing.get_origin(each.kind) is list
        given: Any = rest[index:] if many else rest[index]
        values[each.name] = made(each.hint, given, each.spelled)
        taken = len(rest) if many else index + 1
    if rest[taken:]:
        raise UserError(f"cannot read the argument {rest[taken]!r}: see --help")
    return build(kind, values)


def take_options(kind: type[T], args: list[str]) -> tuple[T, list[str]]:
    """Return the options that the dataclass `kind` declares, and the arguments that are left.

    Raises `UserError` as `parse` does.
    """
    values, rest = read_options(kind, args)
    return build(kind, values), rest


def read_options(kind: type, args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options that `kind` declares, and the arguments that are left."""
    options = {each.spelled: each for each in options_of(kind) if not each.positional}
    values: dict[str, Any] = {}
    rest: list[str] = []
    while args:
        word, equals, value = args[0].partition("=")
        option = options.get(word.replace("_", "-"))
        if option is None:
            rest.append(args[0])
            args = args[1:]
            continue
        count = 0 if equals or option.kind is bool else 1
        words = [value] if equals else args[1 : 1 + count]
        values[option.name] = made(option.hint, read_words(words, option.hint, word), word)
        args = args[1 + count :]
    return values, rest


def made(hint: Any, given: Any, name: str) -> Any:
    """Return the words of the command line as a type.

    A `Path` is local, a `PurePath` may also be in a store. Raises `UserError`, also for a path that
    nothing can have.
    """
    kind = without_none(hint)
    many = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if many else kind
    if kind not in (Path, PurePath) or given is None:
        return make(hint, given, name=name)
    paths = [path_of(text, name, kind is PurePath) for text in (given if many else [given])]
    return paths if many else paths[0]


def path_of(text: str, name: str, stores: bool) -> PurePath:
    """Return the path that a word of the command line is. Raises `UserError`."""
    path = place(text, name, stores)
    make(str, text, name=name)
    if wrong := name_problem(path):
        raise UserError(f"{name}: {path} cannot be a path ({wrong}): choose another one")
    return path


def words(text: str, option: str) -> list[str]:
    """Return the words between commas. Raises `UserError` if one is empty."""
    found = [word.strip() for word in text.split(",")]
    if "" in found:
        raise UserError(
            f"{option}: there is nothing between two commas, or nothing at all: {text!r}"
        )
    return found


def build(kind: type[T], values: dict[str, Any]) -> T:
    """Return a `kind` with `values`. Raises `UserError` for a field that is missing."""
    for each in options_of(kind):
        if each.required and each.name not in values:
            needed = "" if each.positional else f"it must be {describe(each.hint)}, "
            raise UserError(f"{each.spelled} is missing: {needed}see --help")
    return kind(**values)


def print_commands(prog: str, description: str, commands: dict[str, str]) -> None:
    """Print the commands, with a line on each."""
    say(f"usage: {prog} COMMAND ...\n\n{description}\n")
    say(*table([(f"  {name}", text) for name, text in commands.items()]))
    say(f"\n{prog} COMMAND --help says more of one.")


def choose(args: list[str], commands: dict[str, str], prog: str, description: str) -> str:
    """Return the command that the first argument names.

    Without one, and for `--help`, prints the commands and exits with 0. Raises `UserError` for an
    unknown name.
    """
    if not args or args[0] in ("-h", "--help"):
        print_commands(prog, description, commands)
        raise Ended(0)
    if args[0] in commands:
        return args[0]
    # A path is no misspelt command: some of these delete.
    near = "" if "/" in args[0] else nearest(args[0], [*commands, "--help"], 0.7)
    remedy = f"did you mean {prog} {near}?" if near else f"{prog} --help lists them"
    raise UserError(f"unknown command {args[0]!r}: {remedy}")


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
