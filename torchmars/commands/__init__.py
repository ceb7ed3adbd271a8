"""The commands, one file each.

Modules that import torch are imported in `main`, after the options were read: so `--help` and
mistakes are said without the seconds that takes.
"""

import ast
from pathlib import Path

from torchmars.core.console import say

# By what they are for, in the order of a user's first days. Launchers start `launch` themselves.
COMMANDS = {
    "start": ("train", "generate", "plot", "runs", "evaluate", "export"),
    "data": ("prepare", "import"),
    "compare": ("compare", "transfer", "presets"),
    "machines": ("plan", "bench", "rendezvous"),
    "tools": ("config", "checkpoint"),
}
HIDDEN = ("launch",)


def commands() -> list[str]:
    """Return the names of all commands."""
    return [*HIDDEN, *(name for group in COMMANDS.values() for name in group)]


def summary(name: str) -> str:
    """Return the first line of a command's docstring; its file is not imported."""
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def print_commands() -> None:
    """Print the commands in groups, with a line on each."""
    say("usage: torchmars COMMAND ...\n\nPretraining of language models with MARS, its optimizers.")
    for title, group in COMMANDS.items():
        say(f"\n{title}:", *(f"  {name:<10}  {summary(name)}" for name in group))
    say("\ntorchmars COMMAND --help says more of one; --version prints the version.")
