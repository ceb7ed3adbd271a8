"""What ranks compare before they train, and the first traffic between them."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.run import parse_args

from tests.support.commands import ROOT, Command
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_tables, write_config, write_text
from torchmars.cluster import connection, launcher, startup
from torchmars.cluster.environment import Environment
from torchmars.cluster.sizes import MinMax
from torchmars.config.load import config_from_tables
from torchmars.core.errors import EXIT_UNCONNECTED, LostRank, UserError


def compare(tables, store, odd):
    """Compare two ranks, each on a machine of its own; the second is `odd` in one way.

    Returns what this rank got, or the error that it raised.
    """
    rank = dist.get_rank()
    os.environ |= {
        "SLURMD_NODENAME": f"n{rank + 1}",
        "LOCAL_RANK": "0",
        "RDZV_TIMEOUT": "3" if odd == "absent" else "100",
    }
    startup.LOOK_SECONDS = 1.0
    changes = {"clock": 1000.0, "config": "the same"}
    if rank == 1:
        if odd == "absent":
            return None
        if odd == "elsewhere":
            tables["run"]["folder"] += "-elsewhere"
        if odd == "other data":
            tables["data"]["path"] += "-elsewhere"
        changes |= {
            "code": {"code": "0123456789ab"},
            "gpu": {"device": "NVIDIA H100"},
            "late": {"clock": 1060.0},
        }.get(odd, {})
    try:
        return startup.check_ranks(
            config_from_tables(tables, "in a test"),
            dist.FileStore(store, 2),
            lambda config: replace(startup.own_report(config), **changes),
        )
    except (UserError, LostRank) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "odd,told",
    [
        ("", "cluster   2 machines (n1, n2), 1 rank on each: 2 x cpu; clocks within 0."),
        (
            "gpu",
            "warning   devices differ, and the slowest sets the pace: cpu on n1, NVIDIA H100 on n2",
        ),
        ("late", "warning   the clock of n1 is 60.0 s behind that of n2"),
        ("code", "UserError: n2 runs other code of torchmars than n1 (0123456789ab instead of "),
        ("elsewhere", "UserError: n2 does not see what the first machine writes to "),
        ("other data", "UserError: n2 sees other data in data.path than n1 (none instead of "),
    ],
)
def test_ranks_are_compared(tmp_path, odd, told):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text("{}")
    first, second = run_ranks(compare, 2, tiny_tables(tmp_path), str(tmp_path / "store2"), odd)
    assert first == second and any(line.startswith(told) for line in first.splitlines()), first
    assert not list(tmp_path.glob("runs*/tiny/.shared*"))


def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, _ = run_ranks(compare, 2, tiny_tables(tmp_path), str(tmp_path / "store2"), "absent")
    assert first.startswith("LostRank: 1 of 2 ranks did not come within 3 s: 1 (others are on n1)")


def test_a_folder_that_cannot_be_written_is_no_traceback(tmp_path, monkeypatch):
    """And a FIFO in place of the file does not hang."""
    token = startup.Token(tmp_path)
    os.mkfifo(token.file)
    text = token.write()
    assert text and token.file.read_text() == text and not token.problem

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert token.write() == "" and token.problem.startswith(
        f"cannot write to {tmp_path} (Read-only file system): set run.folder to a folder that all"
    )
    token.remove()


SILENT = """
import os, time
import torch.distributed as dist
from torchmars.cluster import connection
from torchmars.train import main

def start(*args):
    os.environ["RDZV_TIMEOUT"] = "4" if os.environ["RANK"] == "0" else "600"
    return original(*args)

original, connection.start = connection.start, start
if os.environ["RANK"] == "1":
    dist.all_reduce = lambda *_: time.sleep(600)
main()
"""


def launch(script, config):
    """Run a script on two ranks; the exit code and what was said on stderr.

    The limits are for a machine that is busy with other things.
    """
    options = ["--nproc-per-node", "2", str(script), str(config)]
    command = Command("launch", options, ROOT, os.environ | {"RDZV_TIMEOUT": "400"}, ranks=2)
    _, err = command.communicate(timeout=500)
    return command.returncode, err


@FULL
def test_a_network_that_carries_nothing_is_told_in_time(tmp_path):
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), tmp_path / "tiny.toml")
    (tmp_path / "silent.py").write_text(SILENT)
    code, err = launch(tmp_path / "silent.py", tmp_path / "tiny.toml")
    assert code == EXIT_UNCONNECTED, err
    assert (
        "the ranks are connected, but cannot exchange data (nothing has come in 4 s): "
        "set GLOO_SOCKET_IFNAME" in err.splitlines()[-1]
    )


@pytest.mark.parametrize(
    "said,code",
    [
        ("[gloo/tcp/pair.cc:1] connect [10.0.0.2]:4711: No route to host", 2),
        ("[gloo/tcp/device.cc:9] Unable to find address for: eth9", 2),
        ("ncclSystemError:\nLast error:\nconnect to 10.0.0.2<4711>: Connection refused", 69),
        ("Gloo connectFullMesh failed with timed out after 46000ms", 69),
    ],
)
def test_a_mistake_in_the_network_is_told_from_a_slow_one(monkeypatch, said, code):
    """A rank's launcher ends the others. A program that has no ranks goes on."""
    ends = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(connection, "end_at_once", ends.append)
    with connection._network_check():
        raise RuntimeError(said)
    assert ends == [code]
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="cannot exchange data"), connection._network_check():
        raise RuntimeError(said)


def test_more_ranks_have_more_time():
    seconds = [
        Environment(NNODES=MinMax(nodes, nodes)).start_seconds(8) for nodes in (1, 8, 64, 512)
    ]
    assert seconds == [49, 77, 301, 600]
    assert Environment(NNODES=MinMax(64, 64), RDZV_TIMEOUT=20).start_seconds(8) == 20


VERDICT = """
import os, sys, time
from pathlib import Path
from torchmars.core.errors import EXIT_CODE_FILE, LostRank, leave_exit_code, report_failure
if os.environ["RANK"] == "0":
    sys.exit(leave_exit_code(2))
while not Path(os.environ[EXIT_CODE_FILE]).exists():
    time.sleep(0.01)
report_failure(LostRank("rank 1 lost rank 0"))
sys.exit(1)
"""


def test_the_verdict_of_a_rank_is_not_lost_in_what_it_does_to_another(tmp_path):
    """The first rank has ended with code 2 before the second one misses it."""
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), tmp_path / "tiny.toml")
    (tmp_path / "verdict.py").write_text(VERDICT)
    code, err = launch(tmp_path / "verdict.py", tmp_path / "tiny.toml")
    assert code == 2, err


class StartedTimer:
    """In place of threading.Timer: it fires when it is called."""

    daemon = False

    def __init__(self, seconds, function):
        StartedTimer.fire = staticmethod(function)

    def start(self):
        pass

    cancel = start


def test_machines_that_have_met_may_take_long_to_start_their_ranks(monkeypatch, capsys):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    args = parse_args(["--rdzv-endpoint", "localhost:0", "-m", "torchmars.train"])
    args.rendezvous = "n1:29400"
    monkeypatch.setattr(threading, "Timer", StartedTimer)
    monkeypatch.setattr(os, "_exit", end)
    with launcher.guarded_rendezvous(args):
        with pytest.raises(Ended, match="2"):
            StartedTimer.fire()
        rendezvous_handler_registry.create_handler(
            RendezvousParameters(launcher.BACKEND, "localhost:0", "test", 1, 1, is_host=True)
        )
        StartedTimer.fire()
    said = "did not meet at n1:29400 (whoever listens there does not answer)"
    assert capsys.readouterr().err.count(said) == 1
