"""Pretraining of large models with the MARS family of optimizers, the same run on every layout."""

import sys
from pathlib import Path

# A command is being started, not a program that imports this: by `torchmars ...`, or by
# `python -m torchmars ...`, of which sys.argv has -m until Python has found the file.
if Path(sys.argv[0]).name in ("-m", "torchmars"):
    from torchmars.begin import begin

    begin()

__version__ = "0.1.0"
