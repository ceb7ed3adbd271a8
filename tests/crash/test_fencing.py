"""A machine that stood still and wakes up spoils nothing of what the others did without it."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.crash.test_kills import tables_of
from tests.support.commands import ROOT, Command, ranks_of
from tests.support.same_end import check_same_end
from tests.support.tiny import metrics, write_config, write_text
from torchmars.config.load import config_from_tables

STEPS = 60
# A first rank that comes for the NUMBER-th time to a PLACE stands there until MARKER-go exists.
STANDING = """
import os
import time
from pathlib import Path

from torchmars.checkpoint.saver import Saver
from torchmars.core import locks
from torchmars.metrics.journal import Journal
from torchmars.train import main

locks.PATIENCE, locks.RENEW_SECONDS = 10.0, 1.0
place, number, marker = os.environ["STAND"].split(",")
owner, calls = Journal if place == "write" else Saver, 0
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


def machine(tables, name, endpoint, number, stand):
    """Start a launcher with one rank of the run of `tables`, as if it were a machine."""
    folder = Path(tables["run"]["folder"]).parent
    file, program = folder / "run.toml", folder / "standing.py"
    write_config(config_from_tables(tables, "in a test"), file)
    program.write_text(STANDING)
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=fencing"]
    options += [f"--rdzv-endpoint={endpoint}", "--rdzv-conf=join_timeout=300", str(program)]
    variables = {"SLURMD_NODENAME": name, "NODE_RANK": number, "RDZV_TIMEOUT": "300"}
    log = (folder / f"{name}.log").open("w")
    return Command(
        "launch",
        [*options, str(file)],
        ROOT,
        os.environ | variables | {"STAND": stand},
        ranks=4,
        stdout=log,
        stderr=log,
    )


def wait_for(condition, *machines, seconds=300):
    """Wait until a condition is true, as long as all `machines` live."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and all(each.poll() is None for each in machines)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
@pytest.mark.parametrize("stand", ["_stage,5", "_publish,5", "_tidy,5", "_clear,5", "write,25"])
def test_a_machine_that_wakes_up_late_spoils_nothing(tmp_path, stand):
    """It is stopped as a whole, the others go on with another one, and then it may go on."""
    write_text(tmp_path)
    changes = {"guards": {"hang_seconds": 20}, "training": {"steps": STEPS}}
    straight, stopped = (tables_of(tmp_path, name, STEPS, changes) for name in ("one", "other"))
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1", 0))
        endpoint, marker = f"127.0.0.1:{opened.getsockname()[1]}", tmp_path / "stands"
        never = f"write,0,{marker}"
        machines = [
            machine(straight, f"s{number}", endpoint, number, never) for number in ("1", "0")
        ]
        assert [each.wait() for each in machines] == [0, 0]
        # The process with the smaller number has the first rank, and the other one the rendezvous.
        late = machine(stopped, "late", endpoint, "1", f"{stand},{marker}")
        host = machine(stopped, "host", endpoint, "0", never)
        wait_for(marker.exists, late, host)
        tree = [late.pid, *ranks_of(late.pid)]  # and processes that wait to become ranks
        for process in tree:
            os.kill(process, signal.SIGSTOP)
        reached = max(metrics(stopped))
        other = machine(stopped, "other", endpoint, "1", never)
        wait_for(lambda: max(metrics(stopped), default=0) > reached + 2, host, other)
        Path(f"{marker}-go").touch()
        for process in tree:
            os.kill(process, signal.SIGCONT)
        assert [each.wait() for each in (host, other)] == [0, 0]
        wait_for(lambda: late.poll() is not None)
    check_same_end(straight, stopped, ranks=2, lines=STEPS + 2)
    print(f"{stand}: the run ends bit for bit as the unbroken one; the late one with {late.poll()}")
