"""A file that a command writes its results to, beside printing them."""

import json
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError, file_errors
from torchmars.core.files import path_problem, write_durably


def check_suffix(out: Path, suffixes: tuple[str, ...], else_be: str = "") -> None:
    """Raise `UserError` if the file of `--out` does not end in one of `suffixes`.

    `else_be` is another possible meaning, if there is one.
    """
    if out.suffix.lower() not in suffixes:
        also = else_be and f", or be {else_be}"
        raise UserError(f"--out: {out} must end in {' or '.join(suffixes)}{also}")


def check_results_file(file: Path | None) -> None:
    """Raise `UserError` if the file of `--json` cannot be written, before the work begins."""
    if file is None:
        return
    wrong = path_problem(file, "file")
    if not file.absolute().parent.is_dir():
        wrong = "its folder does not exist"
    if wrong:
        raise UserError(f"--json: cannot write {file}: {wrong}")


def write_results(file: Path, found: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises `UserError`."""
    with file_errors(f"--json: cannot write {file}"):
        write_durably(file, json.dumps(found, indent=2) + "\n")
