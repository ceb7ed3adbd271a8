"""The kill campaign: a real run is killed again and again, and ends with the weights of one that never was."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints, step_folder
from torchmars.checkpoint.resume import opened
from torchmars.config_file import config_from_tables

ROOT = Path(__file__).parents[2]


def tables_of(folder, name, steps):
    return tiny_tables(folder, run={"name": name}, model={"dropout": 0.1}, training={"steps": steps}, schedule={"name": "constant"},
                       checkpoint={"interval": 4, "keep_last": 2}, validation={"interval": 50, "windows": 4})


def launch(tables, log):
    """Start the run of `tables` on two ranks by the launcher."""
    file = Path(tables["run"]["folder"]).parent / f"{tables['run']['name']}.toml"
    write_config(config_from_tables(tables, "in a test"), file)
    return subprocess.Popen([sys.executable, "-m", "torchmars.launch", "--standalone", "--nproc-per-node", "2", "-m", "torchmars.train", str(file)],
                            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, start_new_session=True)


def ranks_of(launcher):
    """The process numbers of the launcher's ranks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == launcher.pid:
                found.append(int(stat.parent.name))
    return sorted(found)


def kill(number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def saving(folder, since):
    """Whether a save is under way; what an earlier one left is older than `since`."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.stat().st_mtime > since for path in folder.glob("step-*.partial"))
    return False


def kill_at_a_random_moment(launcher, folder, log, rng):
    """SIGKILL one rank or all of them and the launcher, at any time after the first step, half of the time while a save is under way.

    Returns whether one was, or None where the run was over first.
    """
    begun, since = os.fstat(log.fileno()).st_size, time.time()
    while launcher.poll() is None and b"| loss" not in os.pread(log.fileno(), 10**7, begun):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 1))
    if rng.random() < 0.6:
        while launcher.poll() is None and not saving(folder, since):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.04))
    ranks = ranks_of(launcher)
    if launcher.poll() is not None or len(ranks) < 2:
        return None
    inside = saving(folder, since)
    for victim in ([rng.choice(ranks)] if rng.random() < 0.5 else [launcher.pid, *ranks]):
        kill(victim)
    launcher.wait(timeout=60)  # after the death of one rank it ends the other
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        time.sleep(0.01)
    return inside


def campaign(folder, kills, steps):
    write_text(folder)
    straight, killed = (tables_of(folder, name, steps) for name in ("straight", "killed"))
    with (folder / "straight.log").open("w") as log:
        assert launch(straight, log).wait(timeout=600) == 0, (folder / "straight.log").read_text()[-3000:]
    rng, inside, began = random.Random(kills), [], time.monotonic()
    path = run_folder_of(killed) / "checkpoints"
    with (folder / "killed.log").open("a+b") as log:
        while len(inside) < kills:
            launcher = launch(killed, log)
            outcome = kill_at_a_random_moment(launcher, path, log, rng)
            assert outcome is not None, "the run was over before it had been killed often enough"
            inside.append(outcome)
            for each in checkpoints(path):  # what is visible is good
                opened(each, "full")
        assert launch(killed, log).wait(timeout=600) == 0, (folder / "killed.log").read_text()[-3000:]
    said = (folder / "killed.log").read_text()
    assert "falling back" not in said and said.count("continue  from step") >= kills // 4
    finals = [manifests.read(step_folder(run_folder_of(tables) / "checkpoints", steps)).files for tables in (straight, killed)]
    assert {"__0_0.distcp", "__1_0.distcp"} < set(finals[0])
    for name in ("__0_0.distcp", "__1_0.distcp"):  # weights, optimizer state and random numbers
        assert finals[0][name] == finals[1][name]
    lines = [[line.split(', "train/tokens_per_second"')[0] for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines()
              if "stall_ms" not in line] for tables in (straight, killed)]
    assert lines[0] == lines[1] and len(lines[0]) == steps + steps // 50
    print(f"{kills} kills, {sum(inside)} of them inside a save, in {time.monotonic() - began:.0f} s: the run ends bit for bit as the unbroken one")
    return sum(inside)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    assert campaign(tmp_path, kills=2, steps=100) >= 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks")
def test_a_hundred_kills(tmp_path):
    assert campaign(tmp_path, kills=100, steps=3000) >= 30
