"""`torchmars COMMAND ...` = `python -m torchmars COMMAND ...`: one file of commands/ each."""

import ast
import importlib
import sys
from pathlib import Path

from torchmars.core.console import say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.options import choose

FOLDER = Path(__file__).parent / "commands"
DESCRIPTION = "Pretraining of language models with the MARS family of optimizers."


def main() -> None:
    """Run the command that the first argument names on the other arguments."""
    with exit_on_user_error():
        if sys.argv[1:] == ["--version"]:
            from torchmars.core.version import __version__  # it reads files

            say(f"torchmars {__version__}")
            return
        command = choose(sys.argv[1:], commands(), "torchmars", DESCRIPTION)
        sys.argv = [f"torchmars {command}", *sys.argv[2:]]
        importlib.import_module(f"torchmars.commands.{command.replace('-', '_')}").main()


def commands() -> dict[str, str]:
    """Return the commands and the first line of the docstring of each; no file is imported."""
    files = sorted(file for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    texts = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    return {name.replace("_", "-"): text.partition("\n")[0] for name, text in texts.items()}


if __name__ == "__main__":
    main()
