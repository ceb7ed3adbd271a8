"""Loss spikes, gradients that are not finite, the end of the data, a rank that hangs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import listen, listen_here, metrics, run_folder_of, tiny_config, tiny_tables, write_config, write_text
from torchmars import loss
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.config import GuardsConfig
from torchmars.data.loader import Loader
from torchmars.errors import EXIT_HUNG
from torchmars.guards import SpikeGuard

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tables(tmp_path):
    write_text(tmp_path)
    return tiny_tables(tmp_path, training={"steps": 40}, checkpoint={"interval": 10})


def test_what_stands_out():
    guard = SpikeGuard(GuardsConfig(loss_spike="skip", spike_sigmas=4.0))
    for number in range(15):
        assert not guard.stands_out(100.0 * (number == 7) + number % 3)  # too few to compare with
    guard.recent.clear()
    losses = [2.0 + 0.1 * (-1) ** number for number in range(64)]
    assert not any(guard.stands_out(loss) for loss in losses)
    assert not guard.stands_out(2.39) and guard.stands_out(2.45) and guard.stands_out(50.0)
    assert not guard.stands_out(float("nan")) and not guard.stands_out(float("inf"))
    assert len(guard.recent) == 64 and max(guard.recent) == 2.39  # what stands out does not raise the bar


def with_spike(tables, samples):
    """Train with losses ten times as large on the global batches that hold one of `samples`; what this rank printed."""
    step, losses_of, begin = Loader.step, loss.token_losses, [0]

    def noted_step(self):
        begin[0] = self.position
        return step(self)

    def token_losses(model, tokens):
        spike = any(begin[0] <= sample < begin[0] + 16 for sample in samples) and model.training
        return losses_of(model, tokens) * (10 if spike else 1)

    Loader.step, loss.token_losses = noted_step, token_losses
    return listen_here(tables)


def test_a_spike_is_skipped(tables):
    tables["guards"] = {"loss_spike": "skip"}
    out = run_ranks(with_spike, 2, tables, [25 * 16 + 3])[0]
    assert re.search(r"spike     loss \d+\.\d+ at step 26, samples 400 to 415: guards.loss_spike = skip", out)
    assert metrics(tables, "train/skipped_steps")[40] == 1
    losses = metrics(tables)
    assert list(losses) == list(range(1, 41)) and losses[26] > 3 * losses[25] and losses[27] < 1.1 * losses[25]
    off = tables | {"run": tables["run"] | {"name": "off"}, "guards": {}}
    assert "spike  " not in run_ranks(with_spike, 2, off, [25 * 16 + 3])[0]
    assert metrics(off, "train/skipped_steps")[40] == 0


@pytest.mark.parametrize("mode", ["approx", "exact"])
def test_a_spike_rolls_back_and_its_data_is_jumped(tables, mode):
    """The steps after the checkpoint of 20 are made again, with the data after sample 415."""
    tables["guards"] = {"loss_spike": "rollback"}
    tables["optimizer"]["mode"] = mode
    out = run_ranks(with_spike, 2, tables, [25 * 16 + 3])[0]
    assert out.count("spike     ") == 1 and "rollback  to step 20" in out and "goes on at sample 416" in out
    assert list(metrics(tables)) == list(range(1, 41))
    tokens = metrics(tables, "train/tokens")
    assert tokens[20] == 20 * 16 * 32 and tokens[21] == (416 + 16) * 32
    assert [step_of(path) for path in checkpoints(run_folder_of(tables) / "checkpoints")] == [10, 20, 30, 40]
    assert max(metrics(tables).values()) < 6  # no line of the spike is left


def test_a_rollback_ends_the_same_after_a_crash(tables):
    """What the guard has seen is in the checkpoint: a run resumed at step 20 meets the spike of step 26 as the unbroken one did."""
    tables["guards"] = {"loss_spike": "rollback"}
    run_ranks(with_spike, 2, tables, [25 * 16 + 3])
    cut = tables | {"run": tables["run"] | {"name": "cut"}}
    run_ranks(with_spike, 2, cut | {"training": tables["training"] | {"steps": 20}, "schedule": {"warmup_steps": 5, "name": "constant"}}, [])
    straight = tables | {"run": tables["run"] | {"name": "straight"}, "schedule": {"warmup_steps": 5, "name": "constant"}}
    run_ranks(with_spike, 2, straight, [25 * 16 + 3])
    run_ranks(with_spike, 2, cut | {"schedule": straight["schedule"]}, [25 * 16 + 3])
    assert metrics(cut) == metrics(straight)


def test_spikes_that_keep_coming_end_the_run(tables):
    tables["guards"] = {"loss_spike": "rollback"}
    outs = run_ranks(with_spike, 2, tables, range(25 * 16, 10**5))
    assert all("error: the loss stood out after each of 3 returns to" in out and "step-00000020" in out for out in outs)
    tables["checkpoint"]["interval"], tables["run"]["name"] = 0, "none"
    outs = run_ranks(with_spike, 2, tables, range(25 * 16, 10**5))
    assert all("error: the loss stood out at step 26, and there is no checkpoint to go back to" in out for out in outs)


def test_the_end_of_the_data_begins_another_epoch_and_is_told(tables, tmp_path):
    """48,545 tokens are 1517 windows of 32: 94 steps and a bit."""
    tables["training"] |= {"steps": 100, "seq_len": 32}
    tables["checkpoint"]["interval"] = 0
    out = listen(2, tables)
    assert out.count("epoch ") == 1 and out.index("step  95/100") < out.index("epoch 2 begins: the data has been read 1 times") < out.index("step  96/100")


HANGING_RUN = """
import os, time
import torchmars.watchdog
from torchmars.data.loader import Windows
from torchmars.train import main

def read(self, window):
    global reads
    reads += 1
    if os.environ["RANK"] == "1" and reads > 3 * 8:  # in the fourth step
        time.sleep(1000)
    return original(self, window)

original, reads = Windows.__getitem__, 0
Windows.__getitem__ = read
torchmars.watchdog.GRACE_SECONDS = 1.0
main()
"""


def test_a_rank_that_hangs_is_found_and_every_rank_tells_where_it_stands(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path, guards={"hang_seconds": 3.0})
    write_config(config, tmp_path / "hang.toml")
    script = tmp_path / "hang.py"
    script.write_text(HANGING_RUN)
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "torchmars.launch", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path / "hang.toml")],
                           cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_HUNG, ended.stderr
    assert time.monotonic() - began < 40
    report = ended.stderr[ended.stderr.index("error: no step for guards.hang_seconds = 3 s"):]
    assert re.search(r"rank 0: \d+ s in step 4: waiting in the collective gloo:\w+ number \d+ of group \d+, sizes .*; called from", report)
    assert re.search(r"rank 1: \d+ s in step 4: in read \(.*hang.py:\d+\), in no collective; the last was gloo:", report)
    folder = Path(config.run.folder) / config.run.name / "hang"  # with no group of a save's among the collectives
    assert "time.sleep" not in (folder / "rank-00000.txt").read_text() and "in read" in (folder / "rank-00001.txt").read_text()
    assert (folder / "flight_0").stat().st_size and (folder / "flight_1").stat().st_size
