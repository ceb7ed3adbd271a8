"""How run_train.sh starts and ends in a SLURM job, whose commands and Python are stubs here."""

import os
import re
import shutil
import subprocess

import pytest

from tests.support.commands import ROOT
from tests.support.mistakes import mistake
from torchmars.cluster.environment import read_environment

# srun ends with $CODE, and so does the rendezvous of a job of several nodes. scontrol keeps the
# state of the job, with its comment, in the file `job`.
STUBS = {
    "python": """
[ "${3-}" != rendezvous ] || { [ -z "${NNODES-}" ] && exit "$CODE"; echo meet; exec sleep 60; }
[ "${4-}" != --complete ] || exit "$INCOMPLETE"
""",
    "srun": 'exit "$CODE"',
    "scontrol": """
case $1 in
show) [ "$2" = hostnames ] && echo n1 || { echo "JobId=${SHOWN-7} ArrayJobId=5"; cat job; } ;;
update) echo "JobState=RUNNING $3" > job ;;
requeue) echo "requeued $2" ;;
esac
""",
}


@pytest.fixture
def end(tmp_path):
    """Let the job end with an exit code; the job that goes back into the queue, if one does."""
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text("JobState=RUNNING\n")

    def end(code, seconds=0, nodes=1, own=(), leaves=None):
        variables = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CODE": str(code),
            "ENVIRONMENT": "BATCH",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_SUBMIT_DIR": str(ROOT),
            **dict(own),
        }
        script = (ROOT / "run_train.sh").read_text().replace("SECONDS=0", f"SECONDS={seconds}")
        (tmp_path / "script").write_text(script)
        ended = subprocess.run(
            ["bash", "script"], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert ended.returncode == (code if leaves is None else leaves), ended.stderr
        [requeued] = re.findall("^requeued (.*)$", ended.stdout, re.MULTILINE) or [""]
        return requeued

    return end


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_is_complete_or_mistaken_ends(end, code):
    assert not end(code)


ELEMENT = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


def test_a_job_of_an_array_comes_back_alone(end):
    assert end(75, own=ELEMENT) == "5_3"
    assert end(75) == "7"


def test_the_variables_of_an_array_that_has_submitted_a_job_are_not_its_own(end):
    """sbatch hands them on: the job that has submitted this one would be put back."""
    assert end(75, own=ELEMENT | {"SHOWN": "8"}) == "7"


@pytest.mark.parametrize("code", [1, 69, 70])
def test_a_failure_at_once_comes_back_once(end, code):
    assert [end(code) for _ in range(3)] == ["7", "", ""]


@pytest.mark.parametrize("code,again", [(69, True), (2, False)])
def test_a_job_whose_machines_cannot_meet_ends_as_its_rendezvous(end, code, again):
    assert bool(end(code, nodes=2)) == again


@pytest.mark.parametrize("incomplete", [0, 1])
def test_a_launcher_that_was_killed_does_not_put_back_a_complete_run(end, incomplete):
    own = {"NNODES": "1:2", "INCOMPLETE": str(incomplete)}
    assert end(137, nodes=2, own=own, leaves=137 * incomplete) == "7" * incomplete


def test_ranks_that_never_connect_come_back_once_however_long_they_waited(end):
    assert [end(69, seconds=400), end(69, seconds=400)] == ["7", ""]
    assert [end(69, seconds=2000), end(69, seconds=2000)] == ["7", "7"]  # a machine was lost
    assert [end(75), end(1, seconds=400), end(1, seconds=400)] == ["7", "7", "7"]


@pytest.mark.parametrize(
    "command,found",
    [
        ("{clone}/run_train.sh", True),
        ("{clone}/run_train.sh --run.name b/run_train.sh", True),
        ("{tmp}/script", False),  # a copy elsewhere
        ("(null)", False),  # sbatch < run_train.sh
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_a_job_from_another_folder_finds_the_clone_of_its_script(
    tmp_path, command, found, installed
):
    """Its environment and, without one, the line that makes it there; the config is the default."""
    clone, other = tmp_path / "a clone", tmp_path / "else where"
    for folder in (clone / "torchmars", clone / ".venv" / "bin", other):
        folder.mkdir(parents=True)
    (clone / "torchmars" / "__init__.py").touch()
    said = f"JobState=RUNNING\n   Command={command.format(clone=clone, tmp=tmp_path)}"
    scripts = {
        tmp_path / "python": "exit 1",
        tmp_path / "python3": "exit 1",
        tmp_path / "srun": 'echo "srun ${@: -6}"',
        tmp_path / "scontrol": f"[ $2 = hostnames ] && echo n1 || echo '{said}'",
    }
    if installed:
        scripts[clone / ".venv" / "bin" / "python"] = '[ "$1" = -c ] || echo "python $@"'
    for path, script in scripts.items():
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
    shutil.copy(ROOT / "run_train.sh", tmp_path / "slurm_script")
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(other),
    }
    ended = subprocess.run(
        ["bash", "../slurm_script"], cwd=other, env=variables, capture_output=True, text=True
    )
    if found and installed:
        assert ended.returncode == 0, ended.stderr
        assert "python -m torchmars train --prepare quickstart.toml\n" in ended.stdout
        command = f"{clone}/.venv/bin/python -m torchmars train --prepared quickstart.toml"
        assert f"srun {command}\n" in ended.stdout
        return
    remedy = f": python3 -m venv {clone}/.venv && " if found else ": install it, or activate"
    assert ended.returncode == 2 and f"no Python here has torchmars{remedy}" in ended.stderr


def test_a_job_of_several_parts_is_refused(monkeypatch):
    """It would train on the first of them, without a word."""
    job = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH", "SLURM_HET_SIZE": "2"}
    said = mistake(read_environment, job | {"SLURM_JOB_NUM_NODES": "1"})
    assert said.startswith("error: SLURM_HET_SIZE = 2: ")
    assert not mistake(read_environment, job | {"ENVIRONMENT": ""})
