"""Loss spikes, gradients that are not finite, the end of the data, a rank that hangs."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Command
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen,
    listen_here,
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    write_config,
    write_text,
)
from torchmars.config import GuardsConfig
from torchmars.core.errors import EXIT_HUNG
from torchmars.data.loader import Loader
from torchmars.parallel import part
from torchmars.records.events import EVENTS_FILE, read_events
from torchmars.training.guards import LossGuard, recent


@pytest.fixture
def tables(tmp_path):
    write_text(tmp_path)
    return tiny_tables(tmp_path, training={"steps": 30}, checkpoint={"interval": 10})


def test_what_stands_out():
    guard, seen = LossGuard(GuardsConfig(loss_spike="skip", spike_sigmas=4.0)), recent()
    for number in range(15):
        # Too few to compare with.
        assert not guard.check(100.0 * (number == 7) + number % 3, seen)
    seen.clear()
    losses = [2.0 + 0.1 * (-1) ** number for number in range(64)]
    assert not any(guard.check(loss, seen) for loss in losses)
    assert not guard.check(2.39, seen)
    assert guard.check(2.45, seen) and guard.check(50.0, seen)
    assert not guard.check(float("nan"), seen) and not guard.check(float("inf"), seen)
    assert len(seen) == 64 and max(seen) == 2.39  # an outlier does not raise the bar


def with_spike(tables, samples):
    """Train with losses ten times as large on the global batches that hold one of `samples`.

    Returns what this rank printed.
    """
    step, loss_of, begin = Loader.step, part.mean_loss, [0]

    def noted_step(self):
        begin[0] = self.position
        return step(self)

    def mean_loss(*of, **options):
        spike = any(begin[0] <= sample < begin[0] + 16 for sample in samples)
        return loss_of(*of, **options) * (10 if spike else 1)

    Loader.step, part.mean_loss = noted_step, mean_loss
    return listen_here(tables)


def test_a_spike_is_skipped(tables):
    tables["guards"] = {"loss_spike": "skip"}
    out = run_ranks(with_spike, 2, tables, [25 * 16 + 3])[0]
    assert re.search(
        r"spike     loss \d+\.\d+ at step 26, samples 400 to 415: its step is left out", out
    )
    assert metrics(tables, "train/skipped_steps")[30] == 1
    [spike] = (e for e in read_events(run_folder_of(tables) / EVENTS_FILE) if e.kind == "spike")
    assert spike.step == 25 and 10 < spike.facts["loss"] < 60
    losses = metrics(tables)
    assert (
        list(losses) == list(range(1, 31))
        and losses[26] > 3 * losses[25]
        and losses[27] < 1.1 * losses[25]
    )
    off = tables | {"run": tables["run"] | {"name": "off"}, "guards": {}}
    assert "spike  " not in run_ranks(with_spike, 2, off, [25 * 16 + 3])[0]
    assert metrics(off, "train/skipped_steps")[30] == 0


@FULL
def test_a_resumed_run_skips_the_spike_that_an_unbroken_one_skips(tables):
    """What the guard has seen is in the checkpoint of step 20; the spike is step 26."""
    tables["guards"], tables["schedule"] = {"loss_spike": "skip"}, {"name": "constant"}
    run_ranks(with_spike, 2, tables, [25 * 16 + 3])
    cut = tables | {"run": tables["run"] | {"name": "cut"}}
    shorter = cut | {"training": tables["training"] | {"stop_after": 20}}
    run_ranks(with_spike, 2, shorter, [25 * 16 + 3])
    out = run_ranks(with_spike, 2, cut, [25 * 16 + 3])[0]
    assert out.count("spike     ") == 1 and metrics(cut) == metrics(tables)


def test_the_end_of_the_data_begins_another_epoch_and_is_told(tables, tmp_path):
    """48,545 tokens are 1517 windows of 32: 11 steps of 128 and a bit."""
    tables["training"] |= {"steps": 14, "global_batch_size": 128}
    tables["checkpoint"]["interval"] = 0
    out = listen(2, tables)
    assert out.count("epoch ") == 1 and out.index("step 12/14") < out.index(
        "epoch 2 begins: the data has been read 1 times"
    ) < out.index("step 13/14")


# HANG says how each rank hangs in the fourth step. The steps before may take as long as they like.
HANGING_RUN = """
import ctypes, os, signal, time
import torchmars.cluster.watchdog
from torchmars.data.loader import Loader
from torchmars.train import main
from torchmars.cluster.watchdog import Watchdog

how, grace = (os.environ[name].split()[int(os.environ["RANK"])] for name in ("HANG", "GRACE"))
torchmars.cluster.watchdog.GRACE_SECONDS = float(grace)

def beat(self, doing):
    global hangs
    hangs = doing == "step 4"
    self.seconds = 3.0 if hangs else 10000.0
    original_beat(self, doing)

def read(self):
    if hangs and how == "sleep":
        time.sleep(10000)
    if hangs and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if hangs and how == "block":
        c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(1000)
        c.pthread_mutex_init(mutex, None)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)  # for ever, and no other thread of Python gets its turn
    return original_read(self)

original_read, Loader.step = Loader.step, read
original_beat, Watchdog.beat = Watchdog.beat, beat
main()
"""


@contextlib.contextmanager
def hanging(folder, how, grace):
    """The launcher of a run whose ranks hang, and the folder in which they say where."""
    ranks = len(how.split())
    write_text(folder)
    config = tiny_config(
        folder, guards={"hang_seconds": 3.0}, training={"global_batch_size": 4 * ranks}
    )
    write_config(config, folder / "hang.toml")
    script = folder / "hang.py"
    script.write_text(HANGING_RUN)
    process = Command(
        "launch",
        [str(script), str(folder / "hang.toml")],
        ROOT,
        os.environ | {"NGPU": f"{ranks}", "RDZV_TIMEOUT": "300", "HANG": how, "GRACE": grace},
        ranks,
    )
    try:
        yield process, Path(config.run.folder) / config.run.name / "hang"
    finally:
        process.kill()


def test_a_rank_that_hangs_is_found_and_every_rank_leaves_its_stacks(tmp_path):
    with hanging(tmp_path, "not sleep", "60 5") as (process, folder):  # rank 0 fails as 1 ends
        _, err = process.communicate(timeout=900)  # the rank sleeps for longer
    assert process.returncode == EXIT_HUNG, err
    assert "error: rank 0 has been in step 4 for guards.hang_seconds = 3 s: its stacks" in err
    assert re.search(
        r"rank \d on .* failed first, at .*guards.hang_seconds; the stacks of all", err
    )
    stacks = [(folder / f"rank-{rank:05d}.txt").read_text() for rank in range(2)]
    assert " in backward" in stacks[0] and " in read" not in stacks[0] and " in read" in stacks[1]
    assert (folder / "flight_0").stat().st_size and (folder / "flight_1").stat().st_size


@FULL
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_rank_that_is_blocked_outside_python_leaves_its_stack_too(tmp_path):
    """While another one is stopped."""
    with hanging(tmp_path, "stop not block", "5 5 5") as (process, folder):
        _, err = process.communicate(timeout=900)
    assert process.returncode == EXIT_HUNG, err
    assert re.search(r'hang.py", line \d+ in read', text_of(folder / "rank-00002.txt"))
    assert text_of(folder / "rank-00000.txt").count("\n") == 1


def text_of(file):
    return file.read_text() if file.exists() else ""
