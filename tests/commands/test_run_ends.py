"""How ./run_train.sh ends: signals, killed ranks, a mistake of one rank."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import (
    ROOT,
    SECONDS,
    Command,
    all_gone,
    begun,
    descendants,
    finish_run,
    needs_proc,
    ranks_of,
    start,
    start_run,
)
from tests.support.full import FULL, full_but
from tests.support.tiny import tiny_tables, train
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints
from torchmars.cluster.process import ECHO_SECONDS
from torchmars.records.events import EVENTS_FILE, read_events


@needs_proc
@pytest.mark.parametrize(
    "numbers,start_first",
    [
        ([signal.SIGTERM, signal.SIGINT], start_run),
        pytest.param([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], start, marks=FULL),
    ],
    ids=["", "script"],
)
def test_a_signal_saves_and_ends_with_75_and_the_run_goes_on(
    config, tmp_path, numbers, start_first
):
    """Once with each signal; Ctrl-C reaches the whole process group of the terminal.

    The first one may be sent to the script itself.
    """
    step = 0
    for number in numbers:
        process = begun(config, start=start_run if step else start_first)
        assert len(descendants(config)) >= 3  # the launcher and two ranks
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 75, err
        reached = int(re.search(rf"stopped   by {number.name} after step (\d+), saved", out)[1])
        assert reached > step
        assert re.search(rf"checkpoint .*step-{reached:08d} ", out)
        assert "Traceback" not in err
        assert all_gone(config)
        step = reached
    code, out, err = finish_run(config, "--training.steps", str(step + 2))
    assert (
        code == 0
        and f"continue  from step {step}" in out
        and f"step {step + 2}/{step + 2} | loss" in out
    ), err


@needs_proc
def test_a_signal_to_one_rank_stops_all(config):
    process = begun(config)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 75 and "stopped   by a signal to another rank after step" in out, (
        err
    )
    assert all_gone(config)


SLOW_SAVES = """
import os, sys, time
from pathlib import Path
from torchmars.checkpoint.saver import Saver
from torchmars.cluster.process import StopSignals
from torchmars.train import main

def receive(*args):
    original(*args)
    Path(sys.argv[1] + ".received-" + os.environ["RANK"]).touch()

original, StopSignals._receive = StopSignals._receive, receive
write = Saver._write
Saver._write = lambda *args: time.sleep(10000) or write(*args)
main()
"""


def launch(script, config, *args):
    """Start a script that stands in for torchmars.train, on two ranks."""
    env = os.environ | {"NGPU": "2", "RDZV_TIMEOUT": "300"}
    return Command("launch", [str(script), str(config), *args], ROOT, env, ranks=2)


@needs_proc
def test_a_second_signal_ends_at_once(config, tmp_path):
    """While the save that the first one asked for takes for ever."""
    (tmp_path / "slow.py").write_text(SLOW_SAVES)
    process = launch(
        tmp_path / "slow.py", config, *("--training.steps", "1000000", "--validation.interval", "0")
    )
    assert any("| loss" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    while len(list(tmp_path.glob("*.received-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(2 * ECHO_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert all_gone(config)


@needs_proc
@pytest.mark.parametrize("ignored", full_but([False], [False, True]), ids=["", "ignored"])
def test_sigquit_ends_at_once_without_saving(config, tmp_path, ignored):
    """Also where it is ignored at the start, as in what a script starts in the background."""
    within = {"within": ["bash", "-c", 'trap "" QUIT; exec "$0" "$@"']}
    process = begun(config, start=start, **within) if ignored else begun(config)
    process.send_signal(signal.SIGQUIT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGQUIT
    assert all_gone(config)
    assert checkpoints(tmp_path / "runs" / "tiny" / "checkpoints") == []


@FULL
@needs_proc
def test_ranks_save_and_end_with_their_launcher(config, tmp_path):
    """And a signal that nohup has made ignored stays ignored, by the launcher too."""
    process = begun(config, start=start, within=["nohup"])
    everyone = [process.pid, *ranks_of(process.pid)]
    assert len(everyone) == 3
    for number in everyone:
        ignored = re.search(r"SigIgn:\t(\w+)", Path(f"/proc/{number}/status").read_text())[1]
        assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    process.kill()
    assert all_gone(config)
    saved = checkpoints(tmp_path / "runs" / "tiny" / "checkpoints")
    assert len(saved) == 1  # checkpoint.interval is 0


# A rank that dies once while it writes a certain checkpoint.
DIES_ONCE = """
import os, signal, sys
if os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    def hook(event, args):
        if event == "open" and "step-00000015" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""


@needs_proc
def test_a_killed_rank_comes_back_by_itself_and_the_run_ends_as_if_nothing_had_happened(
    config, tmp_path
):
    train(
        2,
        tiny_tables(
            tmp_path, run={"name": "straight"}, training={"steps": 20}, checkpoint={"interval": 5}
        ),
    )
    (tmp_path / "dies").mkdir()
    (tmp_path / "dies" / "sitecustomize.py").write_text(DIES_ONCE)  # Python runs it first
    options = "--run.name killed --training.steps 20 --checkpoint.interval 5"
    options += " --validation.interval 0 --validation.sample_tokens 0"
    code, out, err = finish_run(
        config,
        *options.split(),
        ranks=6,
        MAX_RESTARTS="2",
        PYTHONPATH=f"{tmp_path / 'dies'}:{ROOT}",
    )
    assert code == 0, err
    assert out.count("continue  from step 10") == 1 and out.count("continue  from step") == 1
    files = [
        manifests.read(tmp_path / "runs" / name / "checkpoints" / "step-00000020").files
        for name in ("straight", "killed")
    ]
    assert all(files[0][name] == files[1][name] for name in ("__0_0.distcp", "__1_0.distcp"))


@needs_proc
def test_a_killed_rank_without_restarts_is_told_from_a_stop(config):
    process = begun(config)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL and all_gone(config)
    failed = read_events(config.parent / "runs" / "tiny" / EVENTS_FILE)[-1]
    assert failed.kind == "failed" and "\nSignal 9 (SIGKILL) " in failed.facts["message"]
    assert (failed.facts["rank"], failed.facts["code"]) == (0, -signal.SIGKILL)


ALONE = """
import os
from torchmars.cluster import process
from torchmars.core.errors import UserError
from torchmars.train import main

def check():
    if os.environ["RANK"] == "1":
        raise UserError("too few GPUs")

process.check_devices = check
main()
"""


def test_a_mistake_that_one_rank_alone_finds_ends_all(config, tmp_path):
    """As where one machine has too few GPUs: the others would wait for it."""
    (tmp_path / "alone.py").write_text(ALONE)
    process = launch(tmp_path / "alone.py", config)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 2
