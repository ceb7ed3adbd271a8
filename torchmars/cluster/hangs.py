"""Files that hanging ranks leave for the other ranks and for the launcher."""

import contextlib
from pathlib import Path

BLOCKED = "Timeout ("  # how the interpreter's own watchdog begins


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank: its process, then where it stood when it hung, and its stacks."""
    return folder / f"rank-{rank:05d}.txt"


def lines_of_rank(folder: Path, rank: int) -> list[str]:
    """Return the lines of a rank's file; none where there is no file."""
    with contextlib.suppress(OSError):
        return report_file(folder, rank).read_text(errors="replace").splitlines()
    return []


def place_of_rank(folder: Path, rank: int) -> str | None:
    """Return the line in which a rank wrote where it stands; None if it did not."""
    lines = lines_of_rank(folder, rank)
    return next((line for line in lines if line.startswith(f"rank {rank}: ")), None)


def was_blocked(folder: Path, rank: int, process: int) -> bool:
    """Return whether the interpreter's own watchdog has ended this process of a rank."""
    lines = lines_of_rank(folder, rank) or [""]
    return lines[0].startswith(f"process {process} on ") and is_blocked(lines)


def is_blocked(lines: list[str]) -> bool:
    """Return whether the interpreter's own watchdog wrote to these lines of a rank."""
    return any(line.startswith(BLOCKED) for line in lines)


def hang_report(folder: Path, ranks: int, seconds: float) -> str:
    """Return where each rank stands, in lines, from the files in `folder`."""
    head = f"error: no step for guards.hang_seconds = {seconds:g} s; stacks are in {folder}:"
    places = (place_of_rank(folder, rank) or describe_silent(folder, rank) for rank in range(ranks))
    return "\n  ".join([head, *places])


def describe_silent(folder: Path, rank: int) -> str:
    """Return the known facts about a rank that did not write where it stands."""
    lines = lines_of_rank(folder, rank)
    innermost = [
        line.strip() for before, line in zip(lines, lines[1:]) if "most recent call first" in before
    ]
    if is_blocked(lines) and innermost:  # the main thread comes last
        return f"rank {rank}: blocked outside Python in {innermost[-1]}"
    name = lines[0] if lines else "its process"
    return f"rank {rank}: no word; {name} is stopped, dead or blocked outside Python"
