"""run_train.sh on several machines: by hand, and as a SLURM job where there is a cluster."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.support.commands import ROOT, SECONDS, all_gone, needs_proc, start, start_run
from tests.support.full import FULL
from tests.support.machines import free_endpoint, slurm
from tests.support.tiny import metrics, tiny_tables, train
from torchmars.records.events import EVENTS_FILE, read_events


@pytest.fixture
def endpoint():
    with free_endpoint() as found:
        yield found


SHOWS = """
import os
if "RANK" in os.environ:
    open(__file__ + os.environ["RANK"], "w").write(repr(dict(os.environ)))
"""


@needs_proc
def test_two_machines_by_hand_train_as_one(config, tmp_path, endpoint):
    """Both also prepare the same data, at the same time. Nobody sees by which secret they meet."""
    (tmp_path / "shows").mkdir()
    (tmp_path / "shows" / "sitecustomize.py").write_text(SHOWS)  # Python runs it first
    where = {"NNODES": "2", "RDZV_ENDPOINT": endpoint, "RDZV_TOKEN": "a-secret"}
    where["PYTHONPATH"] = f"{tmp_path / 'shows'}:{ROOT}"
    nodes = [start_run(config, **where) for _ in range(2)]
    outs = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert sum("step 8/8 | loss" in out for out, _ in outs) == 1
    assert any("FSDP over 4 ranks" in out for out, _ in outs)
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(b"MASTER_ADDR" in each for each in files) == 4  # what the ranks were shown
    assert not any(b"a-secret" in each for each in files) and "a-secret" not in str(outs)
    assert "RDZV_TOKEN" not in str(outs)
    straight = tiny_tables(tmp_path, run={"name": "straight"}, training={"steps": 8})
    train(4, straight)
    assert metrics(tiny_tables(tmp_path)) == metrics(straight)
    assert all_gone(config)


NETWORK = """
for name in {0} {1}; do ip netns add $name && ip -n $name link set lo up; done
ip link add tm0 netns {0} type veth peer name tm1 netns {1}
ip -n {0} addr add 10.77.0.1/24 dev tm0 && ip -n {0} link set tm0 up
ip -n {1} addr add 10.77.0.2/24 dev tm1 && ip -n {1} link set tm1 up
"""


@pytest.fixture
def network():
    """Two network namespaces, joined by a cable: 10.77.0.1 and 10.77.0.2."""
    names = [f"torchmars-{os.getpid()}-{number}" for number in range(2)]
    try:
        if subprocess.run(["sh", "-ec", NETWORK.format(*names)], capture_output=True).returncode:
            pytest.skip("needs the right to make network namespaces")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@FULL
@needs_proc
def test_two_machines_with_a_network_between_them_train_as_one(config, tmp_path, network):
    """No name leads to the other machine, and nobody says which interface does."""
    nodes = [
        start(
            config,
            within=["ip", "netns", "exec", name],
            NNODES="2",
            RDZV_ENDPOINT="10.77.0.1:29400",
            SLURMD_NODENAME=f"n{number}",
        )
        for number, name in enumerate(network, start=1)
    ]
    outs = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert "cluster   4 ranks on 2 machines: n1, n2" in outs[0][0]
    straight = tiny_tables(tmp_path, run={"name": "straight"}, training={"steps": 8})
    train(4, straight)
    assert metrics(tiny_tables(tmp_path)) == metrics(straight)
    assert all_gone(config)


IMPATIENT = {"NNODES": "2", "RDZV_TIMEOUT": "5"}


@pytest.mark.parametrize(
    "environment,message",
    [
        pytest.param({"NODE_RANK": "0"}, "the 2 machines did not meet at 127.0.0.1:", marks=FULL),
        pytest.param({"NODE_RANK": "1"}, "the 2 machines did not meet at 127.0.0.1:", marks=FULL),
        ({"RDZV_ENDPOINT": "nowhere.invalid:29400"}, "RDZV_ENDPOINT = nowhere.invalid:29400: "),
        ({"RDZV_ENDPOINT": "29400"}, "RDZV_ENDPOINT must be HOST:PORT"),
        ({"RDZV_ENDPOINT": ""}, "NNODES = 2 needs RDZV_ENDPOINT=HOST:PORT"),
        ({"LOG_RANK": "all"}, "LOG_RANK must be a valid integer"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value.values()),
)
def test_machines_that_cannot_meet_say_so_in_a_line(config, environment, message, endpoint):
    node = start_run(config, **{"RDZV_ENDPOINT": endpoint} | IMPATIENT | environment)
    _, err = node.communicate(timeout=SECONDS)
    assert node.returncode == 2
    assert err.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "number,message",
    [
        ("0", " cannot listen there (Address already in use"),
        pytest.param("1", "(nobody answers there in 5 s)", marks=pytest.mark.slow),
    ],
)
def test_a_port_that_another_program_has_is_told_in_a_line(config, number, message):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = start_run(
            config,
            **IMPATIENT,
            RDZV_ENDPOINT=f"127.0.0.1:{other.getsockname()[1]}",
            NODE_RANK=number,
        )
        _, err = node.communicate(timeout=SECONDS)
    assert node.returncode == 2 and message in err.splitlines()[-1]


DIES = """
import os, sys
if os.environ.get("RANK") == "3":
    os.write(2, b"ImportError: libnothing is missing\\n")
    os._exit(1)
if "RANK" in os.environ:
    os.environ["RDZV_TIMEOUT"] = "5"  # not for the machines, which may take their time to meet
"""


@FULL
@needs_proc
def test_a_rank_that_dies_at_the_start_is_the_last_word_on_every_machine(
    config, tmp_path, endpoint
):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(DIES)  # Python runs it first
    where = {"NNODES": "2", "RDZV_ENDPOINT": endpoint}
    nodes = [
        start_run(
            config,
            **where,
            SLURMD_NODENAME=f"n{number}",
            PYTHONPATH=f"{tmp_path / 'broken'}:{ROOT}",
        )
        for number in (1, 2)
    ]
    errs = [node.communicate(timeout=SECONDS)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    for err in errs:
        assert re.search(
            r"error: rank 3 on n[12] failed first, at ..:..:..: ImportError: libnothing is "
            r"missing; it ended with exit code 1: all it printed is in .*/logs/rank-00003.log\n$",
            err,
        ), err
    assert all_gone(config)
    [failed] = read_events(tmp_path / "runs" / "tiny" / EVENTS_FILE)  # one machine alone tells it
    assert (failed.kind, failed.step, failed.facts["rank"]) == ("failed", 0, 3)


def submit(config, log, endpoint, *args):
    """Submit a job of two nodes with a rank on each; return its number.

    Both nodes may be this machine, so their rendezvous is at an address of the job's own.
    """
    said = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", f"--output={log}", str(ROOT / "run_train.sh"), *args],
        cwd=config.parent,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "NGPU": "1",
            "OMP_NUM_THREADS": "1",
            "CONFIG_FILE": str(config),
            "RDZV_ENDPOINT": endpoint,
            "PYTHONPATH": str(ROOT),
        },
    )
    assert said.returncode == 0, said.stderr
    return said.stdout.strip()


def state_of(job):
    return subprocess.run(
        ["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True
    ).stdout.strip()


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def stepping(log, least=10):
    """Whether the job of a log is at step `least` or later."""
    return log.exists() and any(
        int(step) >= least for step in re.findall(r"^step +(\d+)/", log.read_text(), re.M)
    )


@slurm
def test_a_job_trains_to_the_end_and_a_mistaken_one_fails_once(config, tmp_path, endpoint):
    job = submit(config, tmp_path / "job.log", endpoint)
    mistaken = submit(
        config,
        tmp_path / "mistaken.log",
        endpoint,  # where it never gets
        "--run.name",
        "other",
        "--training.stps",
        "3",
    )
    wait_until(lambda: not state_of(job) and not state_of(mistaken))
    straight = tiny_tables(tmp_path, run={"name": "straight"}, training={"steps": 8})
    train(2, straight)
    assert metrics(tiny_tables(tmp_path)) == metrics(straight)
    assert (
        (tmp_path / "mistaken.log")
        .read_text()
        .splitlines()[-1]
        .startswith("error: unknown key training.stps")
    )


@slurm
def test_two_tasks_of_a_step_are_not_two_machines(config):
    command = ["salloc", "-Q", "-n2", "srun", sys.executable, "-m", "torchmars", "train", config]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NGPU": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.count("error: SLURM_STEP_NUM_TASKS = 2, and each of these processes") == 2


@slurm
@needs_proc
def test_a_cancelled_job_ends_every_process_and_stays_cancelled(config, tmp_path, endpoint):
    job = submit(config, tmp_path / "job.log", endpoint, "--training.steps", "1000000")
    wait_until(lambda: stepping(tmp_path / "job.log"))
    subprocess.run(["scancel", job], check=True)
    wait_until(lambda: not state_of(job))
    assert all_gone(config)


@slurm
@pytest.mark.slow
def test_a_job_that_is_signalled_comes_back_and_ends_as_if_nothing_had_happened(
    config, tmp_path, endpoint
):
    """SLURM holds a job that was put back for two minutes."""
    job = submit(
        config,
        tmp_path / "job.log",
        endpoint,
        "--training.steps",
        "800",
        "--schedule.name",
        "constant",
    )
    wait_until(lambda: stepping(tmp_path / "job.log"))
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait_until(lambda: state_of(job) == "PENDING")
    wait_until(lambda: not state_of(job))
    log = (tmp_path / "job.log").read_text()
    assert "stopped   by SIGUSR1 after step" in log
    assert "continue  from step" in log
    assert log.count("goes back into the queue") == 1
    straight = tiny_tables(
        tmp_path, run={"name": "straight"}, training={"steps": 800}, schedule={"name": "constant"}
    )
    train(2, straight)
    assert metrics(tiny_tables(tmp_path)) == metrics(straight)
