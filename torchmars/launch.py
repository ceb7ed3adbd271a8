"""`python -m torchmars.launch [TORCHRUN OPTIONS] -m torchmars.train CONFIG.toml ...`: torchrun that ends with the run's own exit code.

torchrun itself makes 1 of every code, and starts ranks again after any but 0. So a rank that has said its last word leaves its code in a
file and ends with 0.

Exit codes: 0 the run is complete; 2 a mistake in the config or the data; 75 stopped by SIGTERM, SIGINT or SIGUSR1, saved, not complete: start
it again; 70 a rank hung (1 where it is blocked outside Python); 128 + n ended by signal n; anything else: a crash.
"""

import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun

from torchmars.console import say
from torchmars.errors import EXIT_MISTAKE

LAST_WORD = "TORCHMARS_LAST_WORD"  # names the file
SAVE_SECONDS = 3600  # how long ranks that were asked to stop may take to save; torch 2.11 does not know it, and ends them after 30


def leave(code: int) -> None:
    """End this rank with `code`, by way of the launcher if there is one."""
    if LAST_WORD in os.environ:
        Path(os.environ[LAST_WORD]).write_text(str(code))
        code = 0
    sys.exit(code)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        last_word = Path(folder) / "exit-code"
        os.environ[LAST_WORD] = str(last_word)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # Ranks that are started again must not find the addresses of the dead in the store (torch 2.11 to 2.13 with gloo: every second restart fails).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        try:
            torchrun(["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT", *sys.argv[1:]])
            code = 0
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            last_word.unlink(missing_ok=True)
        except SignalException as error:
            code = 128 + error.sigval
        except RendezvousError as error:
            options = sys.argv[1:]
            endpoint, nodes = (options[options.index(name) + 1] if name in options else "?" for name in ("--rdzv-endpoint", "--nnodes"))
            say(f"error: the {nodes} machines did not meet at {endpoint}: {error or type(error).__name__}: check that each runs the same command with the same "
                "NNODES, and that RDZV_ENDPOINT names one of them and a free port", error=True)
            code = EXIT_MISTAKE
        if last_word.exists():
            code = int(last_word.read_text())
    sys.exit(code if code >= 0 else 128 - code)  # a negative code is the signal that ended the rank


if __name__ == "__main__":
    main()
