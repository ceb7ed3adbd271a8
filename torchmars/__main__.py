"""`torchmars COMMAND ...` = `python -m torchmars COMMAND ...`: one file of commands/ each."""

import ast
import importlib
import sys
from pathlib import Path

from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.help import HELP
from torchmars.core.options import choose

VERSION = "--version"
FOLDER = Path(__file__).parent / "commands"
DESCRIPTION = "Pretraining of language models with the MARS family of optimizers."


def main() -> None:
    """Run the command that the first argument names on the other arguments."""
    with exit_on_user_error():
        known = commands()
        args = sys.argv[1:]
        if args[:1] and args[0] in HELP and args[1:]:  # --help COMMAND, or a section of settings
            args = [args[1], "--help"] if args[1] in known else ["train", *args]
        if args[:1] and args[0].endswith(".toml"):
            raise UserError(f"unknown command {args[0]!r}: did you mean torchmars train {args[0]}?")
        command = choose(args, known | {VERSION: "Print the version."}, "torchmars", DESCRIPTION)
        if command == VERSION:
            from torchmars.core.version import __version__  # it reads files

            return say(f"torchmars {__version__}")
        sys.argv = [f"torchmars {command}", *args[1:]]
        importlib.import_module(f"torchmars.commands.{command.replace('-', '_')}").main()


def commands() -> dict[str, str]:
    """Return the commands and the first line of the docstring of each; no file is imported."""
    files = sorted(file for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    texts = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    return {name.replace("_", "-"): text.partition("\n")[0] for name, text in texts.items()}


if __name__ == "__main__":
    main()
