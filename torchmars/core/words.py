"""Counts and times in the words of messages."""


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number and what it counts: 1 `thing`, else `things`, by default with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
