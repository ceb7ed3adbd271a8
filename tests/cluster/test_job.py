"""What run_train.sh does with the end of a SLURM job, whose commands and Python are stubs here."""

import os
import subprocess

import pytest

from tests.support.commands import ROOT

# srun ends with $CODE. scontrol keeps the state of the job, with its comment, in the file `job`.
STUBS = {
    "python": "true",
    "srun": 'exit "$CODE"',
    "scontrol": """
case $1 in
show) [ "$2" = hostnames ] && echo n1 || cat job ;;
update) echo "JobState=RUNNING $3" > job ;;
requeue) echo requeued ;;
esac
""",
}


@pytest.fixture
def end(tmp_path):
    """Let the job end with an exit code; whether it goes back into the queue."""
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text("JobState=RUNNING\n")

    def end(code, seconds=0):
        variables = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CODE": str(code),
            "ENVIRONMENT": "BATCH",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        script = (ROOT / "run_train.sh").read_text().replace("SECONDS=0", f"SECONDS={seconds}")
        (tmp_path / "script").write_text(script)
        ended = subprocess.run(
            ["bash", "script"], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stderr
        return "requeued" in ended.stdout

    return end


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_is_complete_or_mistaken_ends(end, code):
    assert not end(code)


@pytest.mark.parametrize("code", [1, 69, 70])
def test_a_failure_at_once_comes_back_once(end, code):
    assert [end(code) for _ in range(3)] == [True, False, False]


def test_ranks_that_never_connect_come_back_once_however_long_they_waited(end):
    assert [end(69, seconds=400), end(69, seconds=400)] == [True, False]
    assert [end(75), end(1, seconds=400), end(1, seconds=400)] == [True, True, True]
