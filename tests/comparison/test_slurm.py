"""Comparisons as jobs: of a made-up queue, and of a real cluster where there is one."""

import os
import re
import stat
import subprocess

import pytest

from tests.support.commands import ROOT, SECONDS
from tests.support.machines import slurm
from torchmars.comparison.results import read_comparison
from torchmars.comparison.slurm import SlurmTrials

OPTIONS = ["--optimizers", "adamw,lion", "--lr-grid", "1e-3", "--seeds", "2", "--slurm"]

# A queue is a file with a line for each job. The jobs that it holds never run.
SBATCH = """#!/bin/sh
for word; do case $word in --job-name=*) echo "${word#*=}" >> QUEUE; esac; done
cat "$CONFIG_FILE" > /dev/null && echo 7
"""
SQUEUE = """#!/bin/sh
cat QUEUE
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The file of a made-up queue, which is asked at every look."""
    file = tmp_path / "queue"
    file.touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        program = tmp_path / "bin" / name
        program.write_text(text.replace("QUEUE", str(file)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("torchmars.comparison.slurm.POLL_SECONDS", 0)
    return file


class Killed(BaseException):
    """The end of the waiting process, as by SIGKILL."""


def test_a_job_is_submitted_once_also_when_the_waiting_process_dies(
    run, config, queue, monkeypatch
):
    def die(self):
        raise Killed

    def all_have_failed(self):
        """The jobs leave the queue, and their trials are not complete."""
        for trial in self.running.values():
            (trial.folder / "output.log").write_text("error: no space left on device\n")
        queue.write_text("")
        return ended(self)

    ended = SlurmTrials.ended
    monkeypatch.setattr(SlurmTrials, "ended", die)
    with pytest.raises(Killed):
        run(config, *OPTIONS)
    found = read_comparison(config.parent / "comparisons" / "tiny")
    assert [each.state for each in found.trials] == ["pending"] * 2
    names = queue.read_text().splitlines()
    assert [name[:-13] for name in names] == ["adamw-lr0.001-seed0", "lion-lr0.001-seed0"]
    with pytest.raises(Killed):
        run(config, *OPTIONS)
    assert queue.read_text().splitlines() == names
    monkeypatch.setattr(SlurmTrials, "ended", all_have_failed)
    code, _, err = run(config, *OPTIONS)
    assert code == 0, err
    found = read_comparison(config.parent / "comparisons" / "tiny")
    assert [(each.state, each.reason) for each in found.trials] == [
        ("failed", "no space left on device")
    ] * 2


@slurm
@pytest.mark.slow
def test_on_a_cluster_it_finds_what_it_finds_here(run, config, tmp_path, monkeypatch):
    """Trials have one rank and one thread in both places."""
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RDZV_ENDPOINT", raising=False)
    code, out, err = run(config, *OPTIONS, "--folder", "jobs")
    assert code == 0, err
    here = [each for each in OPTIONS if each != "--slurm"]
    assert run(config, *here, "--folder", "here")[0] == 0
    jobs, local = read_comparison(tmp_path / "jobs"), read_comparison(tmp_path / "here")
    assert [each.loss for each in jobs.trials] == [each.loss for each in local.trials]
    assert {each.state for each in jobs.trials} == {"done"}
    said = subprocess.run(["squeue", "-h", "--me"], capture_output=True, text=True, timeout=SECONDS)
    assert not re.search("lr0.001-seed", said.stdout)
