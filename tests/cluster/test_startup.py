"""What ranks compare before they train, and the first traffic between them."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import ROOT, Command
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_tables, write_config, write_text
from torchmars.cluster import connection
from torchmars.cluster.environment import Environment
from torchmars.cluster.sizes import MinMax
from torchmars.config import ParallelismConfig
from torchmars.config.load import config_from_tables
from torchmars.core.errors import EXIT_UNCONNECTED, LostRank, UserError
from torchmars.parallel.layout import Layout


def compare(tables, odd):
    """Compare two ranks, each on a machine of its own; the second is `odd` in one way.

    Returns what this rank got, or the error that it raised.
    """
    rank = dist.get_rank()
    os.environ |= {"SLURMD_NODENAME": f"n{rank + 1}", "LOCAL_RANK": "0"}
    connection.LOOK_SECONDS = 1.0
    changes = {"config": "the same"}
    if rank == 1:
        if odd == "elsewhere":
            tables["run"]["folder"] += "-elsewhere"
        if odd == "other data":
            tables["data"]["path"] += "-elsewhere"
        changes |= {"code of torchmars": "0123456789ab"} if odd == "code" else {}
    original = connection.own_report
    connection.own_report = lambda config: original(config) | changes
    layout = Layout.create(torch.device("cpu"), ParallelismConfig().degrees(2))
    try:
        return connection.check_ranks(config_from_tables(tables, "in a test"), layout)
    except UserError as error:
        return f"UserError: {error}"


@pytest.mark.parametrize(
    "odd,told",
    [
        ("", "cluster   2 ranks on 2 machines: n1, n2"),
        ("code", "UserError: n2 has another code of torchmars than n1 (0123456789ab instead of "),
        ("elsewhere", "UserError: n2 does not see what the first machine writes to "),
        ("other data", "UserError: n2 has another data.path than n1 (none instead of "),
    ],
)
def test_ranks_are_compared(tmp_path, odd, told):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text("{}")
    first, second = run_ranks(compare, 2, tiny_tables(tmp_path), odd)
    assert first == second and any(line.startswith(told) for line in first.splitlines()), first
    assert not list(tmp_path.glob("runs*/tiny/.shared*"))


def test_a_folder_that_cannot_be_written_is_no_traceback(tmp_path):
    (tmp_path / "file").touch()
    layout = SimpleNamespace(only_first=lambda work: work())
    said = f"cannot write to {tmp_path}/file: .*: set run.folder to a folder that all"
    with pytest.raises(UserError, match=said):
        connection.check_shared(tmp_path / "file" / ".shared", "text", layout)


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
    env = os.environ | {"NGPU": "2", "RDZV_TIMEOUT": "400"}
    command = Command("launch", [str(script), str(config)], ROOT, env, ranks=2)
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
        "cannot exchange data with the others (nothing has come in 4 s): see what they say; set "
        "GLOO_SOCKET_IFNAME" in err.splitlines()[-1]
    )


def test_a_network_that_fails_at_once_is_a_line(monkeypatch):
    """A rank's launcher ends the others. A program that has no ranks goes on."""
    for rank, kind in (("0", LostRank), (None, UserError)):
        monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK")
        with pytest.raises(kind, match="exchange data .*No route.*: see what they say; set GLOO_"):
            with connection._first_traffic():
                raise RuntimeError("[gloo/tcp/pair.cc:1] connect [10.0.0.2]: No route to host")


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
