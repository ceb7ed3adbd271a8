"""Which files a path, a folder or a glob names, on disks and in object stores alike.

A folder stands for the files below it that its kind of source reads, a glob for its matches.
Neither gives what editors, systems, downloads and other programs have left beside a corpus, nor a
file twice that several links lead to. Both are told.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from torchmars.config.source import KINDS
from torchmars.core.console import say, say_if_long
from torchmars.core.errors import UserError
from torchmars.core.places import place
from torchmars.core.words import counted
from torchmars.storage.objects import find_objects

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Names of files and folders that no corpus means: hidden ones, backups and locks of editors, what
# is not written to its end, sums, and the bookkeeping of systems, of Spark and of Delta.
LEFTOVER = re.compile(
    r"[.].*|~[$].*|#.*#|.*~|.*:Zone[.]Identifier|.*_[$]folder[$]|__MACOSX|__pycache__"
    r"|.*[.](aria2|bak|crc|crdownload|incomplete|lock|md5|orig|part|partial|sha\d+|sw[nop]|te?mp)"
    r"|_(SUCCESS|metadata|common_metadata|delta_log|spark_metadata|(started|committed)_.*)"
    r"|_te?mp(orary)?([._-].*)?|.*_[.]gstmp"
)
# Files that a hub puts beside data, in their own folder.
CARD = re.compile(r"(README|LICEN[CS]E)([.](md|txt))?|dataset_(dict|infos?)[.]json")


@dataclass
class FoundFiles:
    """The files that patterns name, and those that are left out by their kind."""

    files: set[PurePath] = field(default_factory=set)
    leftovers: set[PurePath] = field(default_factory=set)
    links: dict[PurePath, PurePath] = field(default_factory=dict)
    """Further names of files that are read, each with the name that is read."""

    def add(self, found: Iterable[PurePath], fixed: int = 0, asked: Iterable[str] = ()) -> None:
        """Add files whose names, below their first `fixed` parts, match the parts that are `asked`.

        A leftover is one unless one of these parts asks for such names: `.*`, or `*.bak`.
        """
        wanted = [part for part in asked if LEFTOVER.fullmatch(part) or CARD.match(part)]
        for file in found:
            names = file.parts[fixed:]
            odd = [name for name in names if LEFTOVER.fullmatch(name)]
            odd += [name for name in names[:1] if len(names) == 1 and CARD.fullmatch(name)]
            if all(any(fnmatchcase(name, each) for each in wanted) for name in odd):
                self.files.add(file)
            else:
                self.leftovers.add(file)

    def once(self) -> list[PurePath]:
        """Return the files, sorted, each once however many links lead to it."""
        self.leftovers -= self.files
        names: dict[object, PurePath] = {}
        for file in sorted(self.files):
            first = names.setdefault(identity(file), file)
            if first != file:
                self.links[file] = first
        return list(names.values())

    def told(self, say: Callable[[str], object] = say) -> list[PurePath]:
        """Return the files as `once` does, and say which are left out."""
        files = self.once()
        if self.leftovers:
            say(
                f"left out {counted(len(self.leftovers), 'file')} that other programs have left "
                f"beside the data (the first: {min(self.leftovers)}): a path or a glob that "
                "asks for such names reads them"
            )
        if self.links:
            link, first = min(self.links.items())
            say(
                f"left out {counted(len(self.links), 'link')} to files that are read under "
                f"another name (the first: {link}, which is {first})"
            )
        return files


def matches(pattern: str, kind: str, option: str) -> FoundFiles:
    """Return the files of text that a path, a folder or a glob names. Raises `UserError` for none.

    Of a folder these are the files whose names end as the kind of source requires.
    """
    path = place(os.path.expanduser(pattern), option, pattern=True)
    plain = KINDS[kind].suffixes
    packed = tuple(suffix + more for suffix in plain for more in COMPRESSED if KINDS[kind].plain)
    found: list[PurePath] = []
    fixed = fixed_parts(path)
    asked = path.parts[fixed:]
    is_folder = isinstance(path, Path) and os.path.isdir(path)
    try:
        with say_if_long(looking(pattern, option)):
            if isinstance(path, Path):
                there = below(path, fixed, ["**"] if is_folder else asked)
                found += (file for file in there if is_file(file))
            else:
                found += find_objects(pattern)
                is_folder = not asked and found != [path]
    except (OSError, ValueError):  # no characters of a path
        found = []
    if is_folder:
        found = [file for file in found if file.name.endswith(plain + packed)]
    result = FoundFiles()
    result.add(found, fixed, asked)
    if not result.files:  # only the cards are meant
        result.files = {file for file in result.leftovers if CARD.fullmatch(file.name)}
    if not result.files:
        also = ", also compressed" if packed else ""
        read = f" (a folder gives its {' and '.join(plain)} files{also})" if is_folder else ""
        others = f", but {min(result.leftovers)}: name that outright" if result.leftovers else ""
        if not read and not others:
            others = f": {other_path(path)}"
        raise UserError(f"{option}: {pattern!r} names no {kind} file{read}{others}")
    return result


def other_path(path: PurePath) -> str:
    """Return the remedy for a path at which there is nothing."""
    if isinstance(path, Path) and not path.is_absolute() and not path.is_dir():
        return f"paths count from the folder that you start in, {os.getcwd()}"
    return "correct the path"


def fixed_parts(path: PurePath) -> int:
    """Return how many parts of a path come before the first one with a wildcard.

    All of them where there is something of this very name.
    """
    if isinstance(path, Path) and os.path.lexists(path):
        return len(path.parts)
    return next(
        (number for number, part in enumerate(path.parts) if glob.has_magic(part)), len(path.parts)
    )


def below(path: Path, fixed: int, asked: Sequence[str]) -> Iterator[Path]:
    """Yield what is at a path, or below its first `fixed` parts and matches what is `asked` there.

    A wildcard matches hidden names too. Raises `OSError`.
    """
    if asked:
        folder = os.path.join(*path.parts[:fixed]) if fixed else ""
        yield from map(Path, walk(folder, list(asked), set()))
    elif os.path.lexists(path):
        yield path


def walk(folder: str, asked: list[str], entered: set[tuple[int, int]]) -> Iterator[str]:
    """Yield what is below a folder and matches, each part of it, the one that is `asked` there.

    `**` stands for any folders, links to folders too, each `entered` once: links may lead in a
    circle. As the last part it stands for all that are no folders.
    """
    first, *rest = asked
    if first == "**" and rest:
        yield from walk(folder, rest, set())
    try:
        with os.scandir(folder or ".") as stream:
            entries = sorted(stream, key=lambda entry: (entry.is_symlink(), entry.name))
        stat = os.stat(folder or ".")
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # as a shell does
        return
    entered.add((stat.st_dev, stat.st_ino))
    for entry in entries:
        name = os.path.join(folder, entry.name)
        is_folder = os.path.isdir(name) if entry.is_symlink() else entry.is_dir()
        if first == "**":
            if not is_folder:
                yield from [] if rest else [name]
            elif (stat := entry.stat()) and (stat.st_dev, stat.st_ino) not in entered:
                yield from walk(name, asked, entered)
        elif fnmatchcase(entry.name, first):
            if not rest:
                yield name
            elif is_folder:
                yield from walk(name, rest, set())


def is_file(path: Path) -> bool:
    """Return whether a path is one of a regular file, or of one that has gone: that is told."""
    return path.is_file() or not path.exists()


def identity(file: PurePath) -> object:
    """Return a key that all names of a file on a disk share; for other files the name itself."""
    try:
        stat = os.stat(file) if isinstance(file, Path) else None
    except OSError:  # whoever reads it says so
        stat = None
    if stat and stat.st_nlink > 1:
        return stat.st_dev, stat.st_ino
    return os.path.realpath(file) if stat else file  # numbers of some mounts are no file's own


def looking(pattern: str, option: str) -> str:
    """Return the line to print while files of a pattern are looked for."""
    path = os.path.expanduser(pattern)
    fixed = path if os.path.isdir(path) else os.path.dirname(re.split(r"[*?[]", path)[0])
    return f"{option}: looking for {pattern!r} in all folders below {os.path.abspath(fixed)}"
