"""Large sets of tests: some run in `pytest`, and all of them where the mark `full` is asked for."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FULL = pytest.mark.full


def full_but(quick: Collection[Any], cases: Iterable[Any], slow: Collection[Any] = ()) -> list[Any]:
    """Return the cases of a parametrised test: those that are not in `quick` are marked `full`.

    Those in `slow`, which others nearly cover, are marked `slow`. A case of several arguments is a
    tuple. Raises `ValueError` where one of `quick` or `slow` is no case.
    """
    cases = list(cases)
    if strangers := [case for case in (*quick, *slow) if case not in cases]:
        raise ValueError(f"not among the cases: {strangers}")

    def marks(case: Any) -> Any:
        return () if case in quick else pytest.mark.slow if case in slow else FULL

    return [pytest.param(*_arguments(case), marks=marks(case)) for case in cases]


def selected(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of `names` in each test of the file that runs and has all these arguments.

    A fixture makes what they need, and nothing for those that do not run.
    """
    items = [item for item in request.session.items if item.path == request.path]
    calls = [getattr(item, "callspec", None) for item in items]
    return [
        tuple(call.params[name] for name in names)
        for call in calls
        if call and set(names) <= call.params.keys()
    ]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
