"""Ranks that die go on from copies in memory, with the steps and bits of an unbroken run."""

import os
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Command, kill
from tests.support.damage import spoil
from tests.support.machines import wait_for
from tests.support.same_end import check_same_end, tables_of
from tests.support.tiny import run_folder_of, write_config, write_text
from torchmars.checkpoint.folder import step_folder
from torchmars.checkpoint.memory import shared_memory
from torchmars.checkpoint.memory.slots import HEADERS, header_of
from torchmars.config.load import config_from_tables

STEPS = 16
# A rank stands at its fourth step after each start, as long as the file ARMED exists.
STANDING = """
import os
import time
from pathlib import Path

from torchmars.checkpoint.memory import shared_memory
from torchmars.train import main
from torchmars.training.trainer import Trainer

folder, rank = Path(os.environ["STAND"]), os.environ["RANK"]
original, calls = Trainer.train_step, 0


def standing(trainer):
    global calls
    calls += 1
    if calls == 4 and rank == "1" and (folder / "armed").exists():
        (folder / "marker").write_text(f"{os.getpid()} {shared_memory.memory_of_launcher()}.")
        time.sleep(10**6)
    return original(trainer)


Trainer.train_step = standing
main()
"""


# A rank loses its folder before its fourth step.
LOSING = """
import os
import shutil

from torchmars.checkpoint.memory import shared_memory
from torchmars.train import main
from torchmars.training.trainer import Trainer

original, calls = Trainer.train_step, 0


def losing(trainer):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1":
        folder = shared_memory.memory_of_launcher()
        shutil.rmtree(folder.rename(f"{folder}-gone"))  # rank 0 may be writing there
    return original(trainer)


Trainer.train_step = losing
main()
"""


def start(tables, log, text=STANDING, **variables):
    folder = Path(tables["run"]["folder"]).parent
    file, program = folder / f"{tables['run']['name']}.toml", folder / "program.py"
    write_config(config_from_tables(tables, "in a test"), file)
    program.write_text(text)
    own = {"NGPU": "2", "MAX_RESTARTS": "9", "RDZV_TIMEOUT": "300", "STAND": str(folder)}
    environment = os.environ | own | variables
    return Command("launch", [str(program), str(file)], ROOT, environment, 12, log, log)


def standing_rank(folder, launcher):
    """Wait until a rank stands; its process and the folder of copies."""
    marker = folder / "marker"
    wait_for(lambda: marker.exists() and marker.read_text().endswith("."), launcher)
    process, _, memory = marker.read_text()[:-1].partition(" ")
    marker.unlink()
    return int(process), Path(memory)


def steps_in(memory):
    return {header_of(file.read_bytes()).step for file in memory.glob(HEADERS)}


def newest_of(memory, rank):
    """Which of a rank's two copies is the newer one."""
    files = sorted(memory.glob(f"rank-{rank:05d}-*.json"))
    return max((header_of(file.read_bytes()).step, file.stem[-1]) for file in files)[1]


@pytest.mark.skipif(not shared_memory.PLACE.is_dir(), reason="needs /dev/shm")
def test_a_killed_rank_costs_the_step_that_it_is_in(tmp_path):
    """Damaged copies cost more: those of one step the step, all of them the way to the disk."""
    write_text(tmp_path)
    changes = {"checkpoint": {"interval": 5, "memory_interval": 1}}
    straight, killed = (tables_of(tmp_path, name, STEPS, changes) for name in ("one", "other"))
    with (tmp_path / "log").open("w") as log:
        assert start(straight, log).wait() == 0
    (tmp_path / "armed").touch()
    with (tmp_path / "log").open("w") as log:
        launcher = start(killed, log)
        process, memory = standing_rank(tmp_path, launcher)
        kill(process)  # in step 4
        process, memory = standing_rank(tmp_path, launcher)  # in step 7
        saved = step_folder(run_folder_of(killed) / "checkpoints", 5)
        wait_for(lambda: steps_in(memory) == {5, 6} and saved.exists(), launcher)
        spoil(memory, "rank-00000", newest_of(memory, 0))
        kill(process)
        process, memory = standing_rank(tmp_path, launcher)  # in step 9
        for number in range(2):
            spoil(memory, "rank-00001", number)
        (tmp_path / "armed").unlink()
        kill(process)
        assert launcher.wait() == 0
        assert not memory.exists()
    said = (tmp_path / "log").read_text()
    origins = [line.split()[3] for line in said.splitlines() if line.startswith("continue")]
    assert origins == ["3:", "5:", "5:"] and said.count("in memory is damaged") == 3
    assert said.count(": the copy in memory") == 2
    check_same_end(straight, killed, ranks=2, lines=STEPS + 1)


@pytest.mark.full
@pytest.mark.skipif(not shared_memory.PLACE.is_dir(), reason="needs /dev/shm")
def test_a_run_that_loses_its_memory_goes_on_without_copies(tmp_path):
    write_text(tmp_path)
    changes = {"checkpoint": {"interval": 5, "memory_interval": 1}}
    straight, loses = (tables_of(tmp_path, name, STEPS, changes) for name in ("one", "other"))
    for tables, text in ((straight, STANDING), (loses, LOSING)):
        with (tmp_path / "log").open("w") as log:
            assert start(tables, log, text).wait() == 0
    warnings = [line for line in (tmp_path / "log").read_text().splitlines() if "warning" in line]
    assert (
        len(warnings) == 1 and "memory_interval makes no copies from here on: rank" in warnings[0]
    )
    check_same_end(straight, loses, ranks=2, lines=STEPS + 1)
