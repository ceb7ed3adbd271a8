"""`torchmars COMMAND ...` = `python -m torchmars COMMAND ...`: one file of torchmars/commands each."""

import importlib
import sys
from pathlib import Path

from torchmars.core.errors import UserError, reported

COMMANDS = sorted(
    file.stem for file in (Path(__file__).parent / "commands").glob("*.py") if file.stem[0] != "_"
)


def main() -> None:
    """Run the command that the first argument names on the other arguments."""
    with reported():
        if sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS:
            raise UserError(f"name a command: torchmars {'|'.join(COMMANDS)} ...")
        del sys.argv[0]
        importlib.import_module(f"torchmars.commands.{sys.argv[0]}").main()


if __name__ == "__main__":
    main()
