"""Real text and GPT-2's tokenizer files, in the folder that the variable TORCHMARS_DATA names."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("TORCHMARS_DATA") or os.devnull)


def needs_data(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where one of the folders `names` is not in `FOLDER`."""
    missing = [name for name in names if not (FOLDER / name).is_dir()]
    reason = f"needs {' and '.join(missing)} in the folder TORCHMARS_DATA"
    return pytest.mark.skipif(bool(missing), reason=reason)
