"""`torchmars COMMAND ...` = `python -m torchmars COMMAND ...`: one file of commands/ each."""

import importlib
import sys

from torchmars import __version__
from torchmars.commands import commands, print_commands
from torchmars.core.check import nearest
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error

VERSION, HELP = "--version", ("-h", "--help")


def main() -> None:
    """Run the command that the first argument names on the other arguments."""
    with exit_on_user_error():
        args, known = sys.argv[1:], commands()
        if args[:1] and args[0] in HELP and args[1:]:  # --help COMMAND, or a section of settings
            args = [args[1], "--help"] if args[1] in known else ["train", *args]
        if not args or args[0] in HELP:
            return print_commands()
        if args[0] == VERSION:
            return say(f"torchmars {__version__}")
        if args[0] not in known:
            raise no_command(args[0])
        sys.argv = [f"torchmars {args[0]}", *args[1:]]
        importlib.import_module(f"torchmars.commands.{args[0]}").main()


def no_command(name: str) -> UserError:
    """Return the error of a command that there is not, with the one that was meant."""
    if name.endswith(".toml"):
        return UserError(f"unknown command {name!r}: did you mean torchmars train {name}?")
    # A path is no misspelt command: some of these delete.
    near = "" if "/" in name else nearest(name, [*commands(), VERSION, "--help"])
    remedy = f"did you mean torchmars {near}?" if near else "torchmars --help lists them"
    return UserError(f"unknown command {name!r}: {remedy}")


if __name__ == "__main__":
    main()
