"""The kill campaign: a run that is killed again and again ends with an unbroken one's weights."""

import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.support.commands import ROOT, Command, kill, ranks_of
from tests.support.full import FULL
from tests.support.same_end import check_same_end, tables_of
from tests.support.small_runs import LOSSES, MODELS, RULES
from tests.support.tiny import run_folder_of, write_config, write_text
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import read_verified
from torchmars.config.load import config_from_tables

HOLDING = """
import os
import threading
import time
from pathlib import Path

from torchmars.train import main
from torchmars.training.trainer import Trainer

rank, place, number, marker = os.environ["HOLD"].split(",")
seen = 0


def holding(original, counts):
    def call(*args, **options):
        global seen
        if counts():
            seen += 1
            if seen == int(number):
                Path(marker).write_text(f"{os.getpid()}.")
                time.sleep(10**6)
        return original(*args, **options)
    return call


if os.environ["RANK"] == rank and place == "save":  # all that makes something durable or visible
    saving = lambda: threading.current_thread().name == "checkpoint"
    for name in ("fsync", "rename", "rmdir", "unlink"):
        setattr(os, name, holding(getattr(os, name), saving))
elif os.environ["RANK"] == rank:
    Trainer.train_step = holding(Trainer.train_step, lambda: True)
main()
"""


@dataclass
class Hold:
    """Where a rank stands still so that it can be killed there, however busy the machine is."""

    rank: int
    place: Literal["save", "step"]
    number: int
    """Which of the durable calls of its saves, or of its steps."""
    marker: Path
    """A file that it makes when it stands there: its process number and a full stop."""


def launch(tables, ranks, log, hold=None):
    """Start the run of `tables` on `ranks` ranks by the launcher."""
    folder = Path(tables["run"]["folder"]).parent
    file = folder / f"{tables['run']['name']}.toml"
    write_config(config_from_tables(tables, "in a test"), file)
    program, environment = ["-m", "torchmars.train"], {"RDZV_TIMEOUT": "300"}
    if hold:
        (folder / "holding.py").write_text(HOLDING)
        program = [str(folder / "holding.py")]
        where = f"{hold.rank},{hold.place},{hold.number},{hold.marker}"
        environment |= {"HOLD": where}
    environment = os.environ | environment | {"NGPU": f"{ranks}"}
    return Command("launch", [*program, str(file)], ROOT, environment, ranks, log, log)


def next_hold(count, ranks, marker, rng):
    """Where the `count`-th kill hits: in a save, then at a step, where the seed says."""
    rank = rng.randrange(ranks)
    if count % 2:
        return Hold(rank, "step", rng.randint(1, 6), marker)
    calls = 20 if rank == 0 else 2  # the others make only one file of each save durable
    return Hold(rank, "save", rng.randint(1, calls), marker)


def kill_at(hold, ranks, launcher, everyone):
    """SIGKILL the rank that stands at `hold`, or `everyone`: all ranks and the launcher."""
    deadline = time.monotonic() + 300
    while not (hold.marker.exists() and hold.marker.read_text().endswith(".")):
        assert launcher.poll() is None, f"the run ended before it came to {hold}"
        assert time.monotonic() < deadline, f"the run did not come to {hold}"
        time.sleep(0.01)
    holding = int(hold.marker.read_text()[:-1])
    hold.marker.unlink()
    processes = ranks_of(launcher.pid)
    assert len(processes) == ranks and holding in processes
    for victim in [launcher.pid, *processes] if everyone else [holding]:
        kill(victim)
    launcher.wait(timeout=600)  # after the death of one rank it ends the others
    while any(Path(f"/proc/{process}").exists() for process in processes):
        time.sleep(0.01)


def finish(launcher, log):
    """Wait for a run to end well."""
    assert launcher.wait(timeout=600) == 0, Path(log.name).read_text()[-3000:]


def campaign(folder, kills, steps, ranks=2, **overrides):
    """Kill a run `kills` times, and compare it with one that nobody killed.

    `overrides` replace keys of its config's sections.
    """
    write_text(folder)
    straight, killed = (
        tables_of(folder, name, steps, overrides) for name in ("straight", "killed")
    )
    with (folder / "straight.log").open("w") as log:
        assert launch(straight, ranks, log).wait(timeout=600) == 0, (
            folder / "straight.log"
        ).read_text()[-3000:]
    rng, inside, began = random.Random(kills), 0, time.monotonic()
    path = run_folder_of(killed) / "checkpoints"
    with (folder / "killed.log").open("a+b") as log:
        for count in range(kills):
            hold = next_hold(count, ranks, folder / "marker", rng)
            kill_at(hold, ranks, launch(killed, ranks, log, hold), everyone=count % 4 in (1, 2))
            inside += hold.place == "save"
            for each in checkpoints(path):  # what is visible is good
                read_verified(each, "full")
        assert launch(killed, ranks, log).wait(timeout=600) == 0, (
            folder / "killed.log"
        ).read_text()[-3000:]
    said = (folder / "killed.log").read_text()
    assert "falling back" not in said and said.count("continue  from step") >= kills // 4
    check_same_end(straight, killed, ranks, lines=steps + math.ceil(steps / 50))
    seconds = time.monotonic() - began
    print(
        f"{kills} kills, {inside} of them inside a save, in {seconds:.0f} s: "
        "the run ends bit for bit as the unbroken one"
    )
    return inside


@FULL
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    assert campaign(tmp_path, kills=2, steps=24) >= 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
def test_a_hundred_kills(tmp_path):
    assert campaign(tmp_path, kills=100, steps=3000) >= 30


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (4, {"parallelism": {"pp": 2}}),
        (4, {"parallelism": {"cp": 2}, "model": {"dropout": 0.0}}),
        (2, {"training": {"ema_decay": 0.9}}),
        (2, {"optimizer": {"mode": "exact"}}),
        *(
            (
                4,
                {
                    "model": MODELS[model] | {"dropout": 0.0},
                    "training": LOSSES[model],
                    "optimizer": RULES["mars-m"],
                    "parallelism": {"ep": 2},
                },
            )
            for model in ("Qwen3-MoE", "DeepSeek")
        ),
    ],
    ids=[
        "a pipeline of shards",
        "sequences cut over shards",
        "a moving average",
        "exact mode",
        "experts over ranks",
        "experts of latent attention",
    ],
)
def test_ten_kills(tmp_path, ranks, overrides):
    assert campaign(tmp_path, 10, 150, ranks, **overrides) >= 3
