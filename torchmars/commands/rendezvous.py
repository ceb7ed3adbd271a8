"""Hold the place where the launchers of several machines meet, apart from them.

Exit codes: 0 ended by a signal; 2 a mistake, or in a job 69 where the port is taken: the job has
another one at its next start.
"""

import os
import signal
import sys
from dataclasses import dataclass

from torchmars.cluster.endpoint import listen
from torchmars.cluster.environment import read_variable
from torchmars.cluster.signals import stopping
from torchmars.core.console import labelled, say
from torchmars.core.errors import exit_on_user_error
from torchmars.core.help import Positional
from torchmars.core.options import parse


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
        endpoint = parse(Rendezvous, sys.argv[1:], "torchmars rendezvous").endpoint
        secret = os.environ.get("RDZV_TOKEN")
        if secret is not None:
            read_variable("RDZV_TOKEN", secret)
        # A job's script has it ignore signals: launchers that save have to meet until they end.
        signals = [each for each in stopping() if signal.getsignal(each) != signal.SIG_IGN]
        # Before there are threads of the store, which would take the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        listener = listen(endpoint, secret is not None)
        from torch.distributed import TCPStore

        address, port = listener.getsockname()[:2]
        number = listener.detach()
        store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=number)
        say(*labelled("meet", f"at {endpoint}, until this process ends"))
        sys.stdout.flush()
        by = signal.Signals(signal.sigwait(signals or [signal.SIGQUIT]))
        say(*labelled("ended", f"by {by.name}"))
        del store
