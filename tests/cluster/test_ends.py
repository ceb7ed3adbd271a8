"""How a rank ends that has failed: its error is told, whatever becomes of the others."""

import os
import re
from socket import gethostname
from types import SimpleNamespace

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.support.commands import ROOT, Command
from tests.support.ranks import context
from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.cluster import watchdog
from torchmars.cluster.failures import failure_of
from torchmars.config.load import config_from_tables
from torchmars.records.events import EVENTS_FILE, read_events

# Leaving the process group waits for the others, as under NCCL where they wait for this rank.
BLOCKING = """
import os, time
import torch.distributed as dist
from torchmars.train import main
from torchmars.training.trainer import Trainer

def step(self):
    if self.state.step == 2 and os.environ["RANK"] == "1":
        raise ValueError("CUDA error: an illegal memory access was encountered")
    return original(self)

original, Trainer.train_step = Trainer.train_step, step
dist.destroy_process_group = lambda: time.sleep(10**6)
main()
"""
HANG_SECONDS = 10_000.0  # after which the watchdog would end it


def test_an_error_is_told_where_leaving_the_process_group_blocks(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, guards={"hang_seconds": HANG_SECONDS})
    write_config(config_from_tables(tables, "in a test"), tmp_path / "tiny.toml")
    (tmp_path / "blocking.py").write_text(BLOCKING)
    options = [str(tmp_path / "blocking.py"), str(tmp_path / "tiny.toml")]
    command = Command(
        "launch", options, ROOT, os.environ | {"NGPU": "2", "RDZV_TIMEOUT": "300"}, ranks=2
    )
    _, err = command.communicate(timeout=600)
    error = "ValueError: CUDA error: an illegal memory access was encountered"
    last = err.splitlines()[-1]
    first = rf"rank 1 on {gethostname()} failed first, at ..:..:..: {error}"
    assert command.returncode == 1 and re.search(first, last)
    folder = run_folder_of(tables)
    assert error in (folder / "logs" / "rank-00001.log").read_text()
    [failed] = [each for each in read_events(folder / EVENTS_FILE) if each.kind == "failed"]
    assert failed.facts["rank"] == 1 and failed.facts["message"].endswith(error)


class OneRank:
    """The part of a layout that a watchdog uses."""

    device = type("Device", (), {"type": "cpu"})
    world = type("World", (), {"rank": 0, "size": 1})

    def on_all(self, work):
        work()


def hang(folder):
    """Hang, and block where the flight recorder is asked: no thread of Python gets its turn."""
    import ctypes
    import time

    watchdog.GRACE_SECONDS = 1.0
    watchdog.c10d = SimpleNamespace(_dump_fr_trace=lambda: ctypes.PyDLL(None).sleep(1000))
    with watchdog.Watchdog(folder, OneRank(), 0.5):
        time.sleep(1000)


def test_a_watchdog_whose_report_blocks_still_ends_the_process(tmp_path):
    process = context.Process(target=hang, args=(tmp_path / "hang",))
    process.start()
    process.join(600)
    assert process.exitcode == 1  # of which the launcher makes 70:
    ended = ProcessFailure(0, process.pid, 1, error_file="")
    assert failure_of(0, ended, [], tmp_path / "hang").code == 70
