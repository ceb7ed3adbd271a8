"""Values of a config.json, checked before they are used."""

from collections.abc import Mapping
from typing import Any

from torchmars.core.errors import UserError


def require_all(config: Mapping[str, Any], **allowed: list[Any]) -> None:
    """Raise `UserError` for a setting with a value that our families do not cover.

    One that is not there is as ours by default. One that is null need not be.
    """
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            known = ", ".join(repr(value) for value in values if value is not None) or "null"
            raise UserError(
                f"its {name} is {config[name]!r}: only models with {known} can be imported"
            )


def whole_number(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Return a setting that is reckoned with. Raises `UserError` if it is no such number."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"its {name} is {value!r}: it must be a whole number, at least {least}")
    return value


def number(config: Mapping[str, Any], name: str) -> float:
    """Return a setting that is a number. Raises `UserError` if it is not."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"its {name} is {value!r}: it must be a number")
    return value
