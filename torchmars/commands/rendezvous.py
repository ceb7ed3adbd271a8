"""Hold the place where the launchers of several machines meet, apart from them.

Exit codes: 0 ended by a signal; 2 a mistake.
"""

import os
import signal
import sys
from dataclasses import dataclass

from torchmars.cluster.environment import read_variable, split_endpoint
from torchmars.cluster.process import stopping
from torchmars.core.cli import Positional, parse
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError, exit_on_user_error


@dataclass
class Rendezvous:
    """Hold the place where the launchers of several machines meet, apart from them.

    Give all launchers RDZV_ENDPOINT=HOST:PORT, and none a NODE_RANK. Then their run can do without
    any one of its machines. RDZV_TOKEN has to be set as it is for the launchers, unless HOST is a
    loopback address. A SLURM job of several nodes starts this command by itself. It ends by Ctrl-C
    or SIGTERM, and the launchers end with it.
    """

    endpoint: Positional[str]
    """HOST:PORT of this machine, which listens at that address alone."""


def main() -> None:
    """Listen at the endpoint that the command line names until a signal comes."""
    with exit_on_user_error():
        options, _ = parse(Rendezvous, sys.argv[1:], "torchmars rendezvous")
        endpoint = options.endpoint
        secret = os.environ.get("RDZV_TOKEN")
        if secret is not None:
            read_variable("RDZV_TOKEN", secret)
        # A job's script has it ignore signals: launchers that save have to meet until they end.
        signals = [each for each in stopping() if signal.getsignal(each) != signal.SIG_IGN]
        # Before there are threads of the store, which would take the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        host, _ = split_endpoint(endpoint, "ENDPOINT")
        from torchmars.cluster.endpoint import is_loopback, listen, open_meeting  # they bring torch

        if secret is None and not is_loopback(host):
            raise UserError(
                f"whoever reaches {endpoint} could join the runs that meet there: set RDZV_TOKEN "
                "to the secret of their launchers"
            )
        listener = listen(endpoint, f"the rendezvous {endpoint}")
        address, port = listener.getsockname()[:2]
        store = open_meeting(address, port, listener)
        say(*labelled("meet", f"at {endpoint}, until this process ends"))
        sys.stdout.flush()
        by = signal.Signals(signal.sigwait(signals or [signal.SIGQUIT]))
        say(*labelled("ended", f"by {by.name}"))
        del store
