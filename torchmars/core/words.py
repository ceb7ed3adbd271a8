"""Words of messages."""


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number and what it counts: 1 `thing`, else `things`, by default with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
