"""A command's own options: by place, by name, and one line for each mistake."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

import pytest

from torchmars.core.check import Interval
from torchmars.core.cli import Positional, parse
from torchmars.core.errors import UserError


@dataclass
class Copy:
    """Copy a file."""

    source: Positional[Path]
    target: Positional[Path]
    times: Annotated[int, Interval(ge=1, le=9)] = 1
    dry_run: bool = False


def copy(*args):
    return parse(Copy, list(args), "copy")[0]


def test_options_stand_before_and_after_places():
    assert copy("a", "b") == Copy(Path("a"), Path("b"))
    assert copy("-a", "-1") == Copy(Path("-a"), Path("-1"))
    for args in (
        ("--times", "3", "a", "--dry-run", "b"),
        ("a", "b", "--dry_run", "--times=3"),
        ("a", "--dry-run", "b", "--times", "3e0"),
        ("a", "--dry-run", "--times", "3.0", "b"),
    ):
        assert copy(*args) == Copy(Path("a"), Path("b"), times=3, dry_run=True)


@pytest.mark.parametrize(
    "args,message",
    [
        (("a",), "required: TARGET: write copy SOURCE TARGET [OPTION ...]"),
        (("a", "b", "c"), "unrecognized arguments: c: see --help"),
        (("a", "b", "--tims", "3"), "unrecognized arguments: --tims 3: did you mean --times?"),
        (("a", "b", "--time", "3"), "unrecognized arguments: --time 3: did you mean --times?"),
        (("a", "b", "--times", "0"), "--times must be greater than or equal to 1, got 0"),
        (("a", "b", "--times", "-3"), "--times must be greater than or equal to 1, got -3"),
        (("a", "b", "--times", "1.5"), "--times must be a valid integer"),
        (("a", "b", "--times", "3", "4"), "unrecognized arguments: 4: see --help"),
        (("a", "b", "--times"), "argument --times: expected one argument: see --help"),
        (("a", "b", "--dry_run=maybe"), "dry-run"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(UserError) as error:
        copy(*args)
    assert message in str(error.value)


def test_a_list_in_the_last_place_takes_what_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no runs

    @dataclass
    class Show:
        """Show runs."""

        kind: Positional[str]
        runs: Positional[list[Path]]
        large: bool = False
        log: Path | None = None

    def show(*args):
        return parse(Show, list(args), "show")[0]

    assert show("all", "--large", "a", "b") == Show("all", [Path("a"), Path("b")], large=True)
    assert show("all", "a", "--log", "none").log is None
    with pytest.raises(UserError, match="required: RUNS: write show KIND runs/NAME"):
        show("all")


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
        ("r --tasks=a b", "arguments: b: see --help"),
        ("r --top-size 3 b", "arguments: b: see --help"),
        ("r --out", "--out: expected one argument: see --help"),
        ("r --top-siz 3", "unrecognized arguments: --top-siz 3: did you mean --top-size?"),
        ("r --Top_Size 3", "unrecognized arguments: --Top-Size 3: did you mean --top-size?"),
    ],
)
def test_what_was_meant(args, message):
    with pytest.raises(UserError) as error:
        parse(Look, args.split(), "look")
    assert str(error.value).endswith(message)
