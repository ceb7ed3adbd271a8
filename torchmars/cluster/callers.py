"""Processes of this package that another one starts: what they import, and how a launcher ends.

A notebook that is killed can stop nothing: its run would train on for nobody. So a launcher that it
has started ends with it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmars.cluster.signals import send_once_gone

# The environment variable with the process number of who has started a launcher.
CALLER = "TORCHMARS_CALLER"
ROOT = Path(__file__).parents[2]  # the folder that torchmars is imported from


def found_as_here(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to change in a process's `variables` so that it imports what this one does.

    It finds this package, installed or not, and no module of the current folder: a `random.py`
    there would be taken for Python's. An empty part of PYTHONPATH means that folder too. The folder
    of installed packages is not named: it would come before Python's own.
    """
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    if ROOT.name not in ("site-packages", "dist-packages"):
        paths.insert(0, str(ROOT))
    named = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return {"PYTHONPATH": named, "PYTHONSAFEPATH": "1"}


def start_launcher(
    arguments: list[str], variables: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `torchmars train` with these arguments and variables; it ends with this process.

    It is in a session of its own: else a terminal would send it Ctrl-C too. `options` are those of
    `Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "torchmars", "train", *arguments],
        env={**variables, **found_as_here(variables), CALLER: str(os.getpid())},
        start_new_session=True,
        **options,
    )


def follow_caller() -> None:
    """Send this process, a launcher, SIGTERM once the process that started it is gone.

    It passes that on to its ranks, which save. One that was started by hand follows nobody.
    """
    caller = os.environ.pop(CALLER, None)
    if caller is not None:
        send_once_gone(int(caller), signal.SIGTERM)
