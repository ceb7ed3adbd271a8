"""A command's own options: by place, by name, and one line for each mistake."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

import pytest

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError
from torchmars.core.help import Positional
from torchmars.core.options import choose, parse, take_options


@dataclass
class Copy:
    """Copy a file."""

    source: Positional[Path]
    target: Positional[Path]
    times: Annotated[int, Range(1, 9)] = 1
    dry_run: bool = False


def copy(*args):
    return parse(Copy, list(args), "copy")


def test_options_stand_before_and_after_places():
    assert copy("a", "b") == Copy(Path("a"), Path("b"))
    for args in (
        ("--times", "3", "a", "--dry-run", "b"),
        ("a", "b", "--dry_run", "--times=3"),
    ):
        assert copy(*args) == Copy(Path("a"), Path("b"), times=3, dry_run=True)


@pytest.mark.parametrize(
    "args,message",
    [
        (("a",), "TARGET is missing"),
        (("a", "b", "c"), "cannot read the argument 'c'"),
        (("a", "b", "--tims", "3"), "unknown option --tims: did you mean --times?"),
        (("a", "b", "--times", "0"), "--times must be at least 1 and at most 9, got 0"),
        (("a", "b", "--times", "1e3"), "--times must be a whole number, got '1e3'"),
        (("a", "b", "--times", "2.0"), "--times must be a whole number, got '2.0'"),
        (("a", "b", "--times"), "--times needs a value: it must be a whole number"),
        (("a", "b", "--dry_run=maybe"), "--dry_run must be true or false, got 'maybe'"),
        (("a" * 300, "b"), "SOURCE: aaa"),
        (("a", "a" * 5000), "cannot be a path (File name too long): choose another one"),
        (("a", "a/" * 300), "cannot be a path (it has more than 200 folders within each other)"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(UserError) as error:
        copy(*args)
    assert message.split(" and at most")[0] in str(error.value)


def test_a_list_in_the_last_place_takes_what_is_left():
    @dataclass
    class Show:
        """Show runs."""

        kind: Positional[str]
        runs: Positional[list[Path]]
        large: bool = False
        log: Path | None = None

    def show(*args):
        return parse(Show, list(args), "show")

    assert show("all", "a", "--large", "b") == Show("all", [Path("a"), Path("b")], large=True)
    with pytest.raises(UserError, match="RUNS is missing"):
        show("all")
    with pytest.raises(UserError, match="RUNS: aaa.* cannot be a path"):
        show("all", "a", "a" * 300)
    with pytest.raises(UserError, match="--log: aaa.* cannot be a path"):
        show("all", "a", "--log", "a" * 300)


@dataclass
class Look:
    """Look at a run."""

    run: Positional[PurePath]
    tasks: str | None = None
    """Tasks, with commas between them."""
    top_size: int = 1
    """How many."""
    out: Path | None = None
    """Where to."""


@pytest.mark.parametrize(
    "args,message",
    [
        ("r --tasks=a b", "'b': see --help"),
        ("r --top-size 3 b", "'b': see --help"),
        ("r --out", "--out needs a value: it must be the path of a file or folder"),
        ("r --top 3", "unknown option --top: did you mean --top-size?"),
        ("r --size 3", "unknown option --size: did you mean --top-size?"),
        ("r --TopSize 3", "unknown option --TopSize: did you mean --top-size?"),
    ],
)
def test_what_was_meant(args, message):
    with pytest.raises(UserError) as error:
        parse(Look, args.split(), "look")
    assert str(error.value).endswith(message)


def test_what_is_no_option_of_the_command_is_left():
    @dataclass
    class Plan:
        world_size: int

    taken = take_options(Plan, ["a.toml", "--world-size", "4", "--run.name", "x"])
    assert taken == (Plan(4), ["a.toml", "--run.name", "x"])
    with pytest.raises(UserError, match="--world-size is missing: it must be a whole number"):
        take_options(Plan, ["a.toml"])


def test_the_nearest_command_is_named(capsys):
    commands = {"train": "Train a model.", "plan": "Plan a run."}
    assert choose(["plan", "x"], commands, "tool", "A tool.") == "plan"
    with pytest.raises(UserError, match="unknown command 'trian': did you mean tool train?"):
        choose(["trian"], commands, "tool", "A tool.")
    for args in ([], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            choose(args, commands, "tool", "A tool.")
        assert not ended.value.code
        assert "  train  Train a model.\n  plan   Plan a run.\n" in capsys.readouterr().out
