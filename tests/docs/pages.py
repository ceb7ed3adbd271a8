"""README.md, AGENTS.md and the pages of docs/: blocks of code, commands, headings and links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"```(\w*)")
ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.(?:toml|py|yaml))\n")


@dataclass
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The number of its first line in the page, from 1."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass
class Command:
    """A command of a shell block: variables set for it, and its words."""

    variables: dict[str, str]
    words: list[str]


def split_page(page: Path) -> tuple[list[Block], list[str]]:
    """Return the blocks of a page, and its lines outside of them.

    Raises `ValueError` for a fence that does not stand alone at the beginning of its line.
    """
    found: list[Block] = []
    prose: list[str] = []
    block: Block | None = None
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = FENCE.fullmatch(line)
        if "```" in line and (fence is None or block is not None and fence[1]):
            raise ValueError(f"{page.name}:{number}: {line!r} is no fence")
        if fence is None:
            if block is None:
                prose.append(line)
            else:
                block.text += line + "\n"
        elif block is None:
            block = Block(page, number + 1, fence[1], "")
        else:
            found.append(block)
            block = None
    if block is not None:
        raise ValueError(f"{block} has no end")
    return found, prose


def blocks(language: str) -> list[Block]:
    """Return the blocks of all pages that are in a language."""
    return [block for page in PAGES for block in split_page(page)[0] if block.language == language]


def named_files(language: str) -> dict[str, str]:
    """Return the texts of the blocks that begin with a file's name, `# NAME.toml`, by that name."""
    named = [(FILE_NAME.match(block.text), block.text) for block in blocks(language)]
    return {name[1]: text for name, text in named if name}


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block, in order."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((i for i, word in enumerate(words) if set(word) <= set("&|;")), len(words))
            found.append(_command(words[:end]))
            words = words[end + 1 :]
    return found


def _command(words: list[str]) -> Command:
    words = words[1:] if words[0] == "export" else words
    variables = {}
    while words and (assignment := ASSIGNMENT.fullmatch(words[0])):
        variables[assignment[1]] = assignment[2]
        words = words[1:]
    return Command(variables, words)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = [line.lstrip("#") for line in split_page(page)[1] if re.match("#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings}


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures that are not on the web."""
    prose = "\n".join(split_page(page)[1])
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match("https?://", target)]
