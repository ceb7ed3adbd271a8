"""Shared by the fields of all sections: bounded types, marks, and how a check fails."""

import enum
from collections.abc import Callable
from typing import Annotated, Any

from torchmars.core.check import Interval
from torchmars.core.errors import UserError

# Upper bounds are beyond all that is meant, and below what overflows. NaN is above each of them.
Count = Annotated[int, Interval(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Interval(ge=1, le=1_000_000_000)]
Amount = Annotated[float, Interval(ge=0, le=1_000_000)]
MoreThan0 = Annotated[float, Interval(gt=0, le=1_000_000)]
Part = Annotated[float, Interval(ge=0, le=1)]
Clip = Annotated[float, Interval(ge=0, le=float("inf"))]


class Mark(enum.Enum):
    """The meaning of a changed field or section for a run that resumes from its checkpoint."""

    IDENTITY = "another value is another run: the checkpoint is refused"
    REPORTED = "a section whose changes are allowed and listed, since they change what is computed"
    CHANGEABLE = "of a model's settings: another value is the same run"
    NO_SHAPE = "of a model's settings: a whole number that changes the shape of no weight"


def remade(section: Callable[[str], type], name: str, values: dict[str, Any]) -> Any:
    """Return a section of a family or a rule again: its class is made, so pickle cannot find it."""
    return section(name)(**values)


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)
