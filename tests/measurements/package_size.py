"""How large the package is: files, lines and tokens of Python, lines of script, style and template.

    python -m tests.measurements.package_size [COMMIT ...]

Of the files that git knows, as they are here, and as they were at each commit. Tokens are those of
Python's own tokenizer without comments, docstrings, line ends and indents.
"""

import io
import subprocess
import sys
import tokenize
from pathlib import PurePath

OTHERS = (".js", ".css", ".html")
NO_TOKENS = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def tokens_of(text: str) -> int:
    """Return how many tokens a file of Python has. A docstring stands alone in its line."""
    found = [
        each
        for each in tokenize.generate_tokens(io.StringIO(text).readline)
        if each.type not in NO_TOKENS
    ]
    return sum(each.type != tokenize.STRING or each.line.strip() != each.string for each in found)


def size(commit: str) -> list[int]:
    """Return the files, lines and tokens of Python, and the lines of all else; "": as it is."""
    listed = git("ls-tree", "-r", "--name-only", commit, "torchmars") if commit else ""
    names = (listed or git("ls-files", "torchmars")).split()
    texts = {
        name: git("show", f"{commit}:{name}")
        for name in names
        if PurePath(name).suffix in (".py", *OTHERS)
    }
    python = [text for name, text in texts.items() if name.endswith(".py")]
    others = [text for name, text in texts.items() if not name.endswith(".py")]
    lines = [sum(len(text.splitlines()) for text in each) for each in (python, others)]
    return [len(python), lines[0], sum(map(tokens_of, python)), lines[1]]


def main() -> None:
    """Print a line for each commit, and one for what is staged."""
    print(f"{'':12}  {'files':>6}  {'lines':>6}  {'tokens':>7}  {'others':>6}")
    for commit in (*sys.argv[1:], ""):
        files, lines, tokens, others = size(commit)
        print(f"{commit or 'here':12}  {files:6}  {lines:6}  {tokens:7}  {others:6}")


if __name__ == "__main__":
    main()
