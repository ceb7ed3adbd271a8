"""A launcher that another process of this package starts, and that ends with it.

A notebook that is killed can stop nothing: its run would train on for nobody.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from torchmars.cluster.signals import send_once_gone

# The environment variable with the process number of who has started a launcher.
CALLER = "TORCHMARS_CALLER"


def start_launcher(
    arguments: list[str], variables: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `torchmars train` with these arguments and variables; it ends with this process.

    It is in a session of its own: else a terminal would send it Ctrl-C too. `options` are those of
    `Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "torchmars", "train", *arguments],
        env={**variables, CALLER: str(os.getpid())},
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
