"""Shared by the fields of all sections: bounded types, marks, and how a check fails."""

import enum
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import Annotated, Any, TypeVar

from torchmars.core.bounds import Range
from torchmars.core.errors import UserError

T = TypeVar("T")

# Upper bounds are beyond all that is meant, and below what overflows.
Count = Annotated[int, Range(0, 1_000_000_000)]
Positive = Annotated[int, Range(1, 1_000_000_000)]
Amount = Annotated[float, Range(0, 1_000_000)]
Clip = Annotated[float, Range(0, float("inf"))]


class Mark(enum.Enum):
    """The meaning of a changed field or section for a run that resumes from its checkpoint."""

    IDENTITY = "another value is another run: the checkpoint is refused"
    REPORTED = "a section whose changes are allowed and listed, since they change what is computed"
    CHANGEABLE = "of a model's settings: another value is the same run"
    NO_SHAPE = "of a model's settings: a whole number that changes the shape of no weight"


def with_settings(kind: type[T], settings: Mapping[str, tuple[Any, Any, str]]) -> type[T]:
    """Return the section `kind` with more fields, of each its type, its default and its `--help`.

    They are those that rules or models declare.
    """
    more = [
        (name, hint, field(default=default, metadata={"help": text}))
        for name, (hint, default, text) in settings.items()
    ]
    same = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, more, bases=(kind,), frozen=True, namespace=same)


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)
