"""Print what a bug report needs of a machine, and whether two ranks can meet on it."""

import sys
from dataclasses import dataclass

from torchmars.core.console import say
from torchmars.core.errors import Ended, exit_on_user_error
from torchmars.core.options import parse
from torchmars.core.tables import table


@dataclass
class Doctor:
    """Print what a bug report needs: versions, devices, extras, compilers, limits.

    Then two ranks meet. The exit code is 1 if they cannot.
    """


def main() -> None:
    """Print what there is on this machine, and whether two ranks can meet on it."""
    with exit_on_user_error():
        parse(Doctor, sys.argv[1:], "torchmars doctor")
        from torchmars.cluster import health

        problem = health.meeting_problem()
        rows = [*health.machine(), *health.limits(), *health.packages()]
        say(*table([*rows, ("two ranks", problem or "they meet")]))
        raise Ended(1 if problem else 0)
