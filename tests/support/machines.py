"""Launchers of one rank each, that are machines of one run."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Command, ranks_of
from tests.support.tiny import run_folder_of, write_config
from torchmars.config.load import config_from_tables

NEVER = "write,0,"  # stand nowhere
# A first rank that comes for the NUMBER-th time to a PLACE stands there until MARKER-go exists.
STANDING = """
import os
import time
from pathlib import Path

from torchmars.checkpoint.upkeep import Retention
from torchmars.checkpoint.saver import Saver
from torchmars.core import files
from torchmars.records.lines import Journal
from torchmars.train import main

files.PATIENCE = 10.0
os.environ["RDZV_TIMEOUT"] = "300"  # not for the machines
place, number, marker = os.environ["STAND"].split(",")
[owner] = [each for each in (Journal, Retention, Saver) if place in vars(each)]
calls = 0
original = getattr(owner, place)


def standing(*args, **options):
    global calls
    calls += 1
    if calls == int(number):
        Path(marker).touch()
        while not Path(marker + "-go").exists():
            time.sleep(0.02)
    return original(*args, **options)


if os.environ["RANK"] == "0":
    setattr(owner, place, standing)
main()
"""


def start_store(endpoint):
    """Start a rendezvous, and wait until it listens."""
    store = Command("rendezvous", [endpoint], ROOT)
    assert store.stdout.readline() == f"meet      at {endpoint}, until this process ends\n"
    return store


@contextlib.contextmanager
def free_endpoint():
    """HOST:PORT that no other program is given in the body: bound, but not listened at.

    So the launchers, which allow such a port to be used again, may have it.
    """
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{opened.getsockname()[1]}"


class Way:
    """A way to an endpoint that can be `cut`: what is sent arrives nowhere, and no end is told."""

    cut = False

    def __init__(self, endpoint):
        host, port = endpoint.split(":")
        self.target = host, int(port)

    def __enter__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.sockets = [listener]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception):
        for each in self.sockets:
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.sockets[0].accept()
                far = socket.create_connection(self.target)
                self.sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if not self.cut:
                    sink.sendall(data)


def machine(tables, name, endpoint, stand=NEVER, join_seconds=300, nodes="2", starts=4):
    """Start a launcher with one rank of the run of `tables`, as if it were a machine.

    `torchmars rendezvous` runs at the endpoint. Machines of an elastic run, whose `nodes` are
    MIN:MAX, are taken in a second after the last change. The rank may be started `starts` times.
    """
    folder = Path(tables["run"]["folder"]).parent
    # Of each its own: another machine may read while this one's are written.
    file, program = folder / f"{name}.toml", folder / f"{name}.py"
    write_config(config_from_tables(tables, "in a test"), file)
    program.write_text(STANDING)
    variables = {"SLURMD_NODENAME": name, "NNODES": nodes, "NGPU": "1", "MAX_RESTARTS": "3"}
    variables |= {"RDZV_ENDPOINT": endpoint, "RDZV_TIMEOUT": str(join_seconds), "JOIN_SECONDS": "1"}
    log = (folder / f"{name}.log").open("w")
    return Command(
        "launch",
        [str(program), str(file)],
        ROOT,
        os.environ | variables | {"STAND": stand},
        ranks=starts,
        stdout=log,
        stderr=log,
    )


def machine_of_first_rank(tables):
    """The name of the machine on which rank 0 was started last: of those that came first."""
    said = (run_folder_of(tables) / "logs" / "rank-00000.log").read_text()
    return re.findall(r"^--- .* (\S+) rank 0 of", said, re.MULTILINE)[-1]


def wait_for(condition, *machines, seconds=300):
    """Wait until a condition is true, as long as all `machines` live."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and all(each.poll() is None for each in machines)
        time.sleep(0.05)


def tree_of(launcher):
    """The processes of a machine, and those that wait to become its ranks."""
    return [launcher.pid, *ranks_of(launcher.pid)]


def signal_all(processes, number):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def idle_nodes():
    """How many nodes of a SLURM cluster this machine may use."""
    if shutil.which("sbatch") is None:
        return 0
    said = subprocess.run(["sinfo", "-h", "-o", "%D"], capture_output=True, text=True)
    return sum(map(int, said.stdout.split())) if said.returncode == 0 else 0


slurm = pytest.mark.skipif(idle_nodes() < 2, reason="needs a SLURM cluster of two nodes")
