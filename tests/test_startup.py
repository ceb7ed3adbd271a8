"""What ranks compare before they train, and the first traffic between them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tiny import tiny_config, tiny_tables, write_config, write_text
from torchmars import startup
from torchmars.config_file import config_from_tables
from torchmars.errors import LostRank, UserError

ROOT = Path(__file__).parents[1]


def compare(tables, store, odd):
    """Compare two ranks, each on a machine of its own; the second is `odd` in one way. What each got, or is told."""
    rank = dist.get_rank()
    os.environ |= {"SLURMD_NODENAME": f"n{rank + 1}", "LOCAL_RANK": "0", "RDZV_TIMEOUT": "3"}
    startup.LOOK_SECONDS = 1.0
    if rank == 1:
        if odd == "absent":
            return None
        if odd == "elsewhere":
            tables["run"]["folder"] += "-elsewhere"
            startup.config_text = lambda config: "the same"
        if odd == "other data":
            tables["data"]["path"] += "-elsewhere"
            startup.config_text = lambda config: "the same"
        if odd == "code":
            startup.code_hash = lambda: "0123456789ab"
        if odd == "gpu":
            startup.device_name = lambda: "NVIDIA H100"
        if odd == "late":
            startup.time = type("Clock", (), {"time": staticmethod(lambda: time.time() + 60), "monotonic": time.monotonic, "sleep": time.sleep})
    else:
        startup.config_text = startup.config_text if odd not in ("elsewhere", "other data") else lambda config: "the same"
    try:
        return startup.compare_ranks(config_from_tables(tables, "in a test"), dist.FileStore(store, 2))
    except (UserError, LostRank) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("odd,told", [
    ("", "cluster   2 machines (n1, n2), 1 ranks on each: 2 x cpu; clocks within 0."),
    ("gpu", "warning   devices differ, and the slowest sets the pace: cpu on n1, NVIDIA H100 on n2"),
    ("late", "warning   the clock of n1 is 60.0 s behind that of n2"),
    ("code", "UserError: n2 runs other code of torchmars than n1 (0123456789ab instead of "),
    ("elsewhere", "UserError: n2 does not see what the first machine writes to "),
    ("other data", "UserError: n2 sees other data in data.path than n1 (none instead of ")])
def test_ranks_are_compared(tmp_path, odd, told):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text("{}")
    first, second = run_ranks(compare, 2, tiny_tables(tmp_path), str(tmp_path / "store2"), odd)
    assert first == second and any(line.startswith(told) for line in first.splitlines()), first
    assert not list(tmp_path.glob("runs*/tiny/.shared*"))


def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, _ = run_ranks(compare, 2, tiny_tables(tmp_path), str(tmp_path / "store2"), "absent")
    assert first.startswith("LostRank: 1 of 2 ranks did not come within 3 s: 1 (others are on n1)")


SILENT = """
import os, time
import torch.distributed as dist
from torchmars.train import main
if os.environ["RANK"] == "1":
    dist.all_reduce = lambda *_: time.sleep(600)
main()
"""


def test_a_network_that_carries_nothing_is_told_in_time(tmp_path):
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), tmp_path / "tiny.toml")
    (tmp_path / "silent.py").write_text(SILENT)
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "torchmars.launch", "--nproc-per-node", "2", str(tmp_path / "silent.py"), str(tmp_path / "tiny.toml")],
                           capture_output=True, text=True, cwd=ROOT, timeout=60, env=os.environ | {"RDZV_TIMEOUT": "4", "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 2 and time.monotonic() - began < 30
    assert "the ranks have met, but cannot exchange data (nothing has come in 4 s): set GLOO_SOCKET_IFNAME" in ended.stderr.splitlines()[-1]
