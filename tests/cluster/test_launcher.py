"""How a launcher ends, and what of it the console gets."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from torchmars.cluster.environment import Environment
from torchmars.cluster.failures import RankLogs, keep_apart
from torchmars.cluster.launcher import RankLauncher
from torchmars.cluster.process import STOPPING
from torchmars.cluster.rendezvous import Machines
from torchmars.cluster.sizes import MinMax, UsableSizes
from torchmars.core.console import say
from torchmars.core.errors import EXIT_STOPPED, EXIT_UNCONNECTED


def launcher(folder, command, ranks):
    """The launcher of the one machine of a run."""
    logs = RankLogs(folder / "logs", folder, {0})
    sizes = UsableSizes(MinMax(1, 1), [1], ranks, 1)
    meeting = Machines("run", Environment(), sizes)
    hang = folder / "hang"
    return RankLauncher(command, ranks, meeting, "n1:29400", logs, hang, 0, lambda: 0, print)


@pytest.fixture
def ending(tmp_path, monkeypatch, capsys):
    """Let a launcher end by an error, after a rank has left an exit code, or none has.

    Signals come while it leaves the run, and change nothing.
    """
    handlers = {}
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    def end(error, left=None):
        def meet():
            made.starts = 1
            made.exit_code_file.write_text("" if left is None else str(left))
            raise error

        def leave():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGQUIT):
                handlers[number](number, None)
                made.meeting.look()

        made = launcher(tmp_path, [], 1)
        made.meeting.meet, made.meeting.leave = meet, leave
        code = made.run()
        out, err = capsys.readouterr()
        return code, out + err

    return end


def test_a_launcher_whose_ranks_have_saved_says_what_it_has_lost(ending):
    lost = RendezvousConnectionError("failed to recv, got 0 bytes\nframe #0: c10::Error")
    code, said = ending(lost, EXIT_STOPPED)
    assert code == EXIT_STOPPED and said == (
        "stopped   and saved: n1 has lost the other machines (failed to recv, got 0 bytes); "
        "the same command resumes\n"
    )
    assert ending(lost, 0) == (0, "")  # where the run is complete, the other machine is just done
    assert ending(lost) == (
        EXIT_UNCONNECTED,
        "error: n1 has lost the other machines: failed to recv, got 0 bytes\n",
    )


def test_a_signal_before_any_rank_could_save_is_one_line(ending):
    line = "stopped   by SIGINT before it could save; the same command resumes\n"
    assert ending(SignalException("ended", signal.SIGINT)) == (130, line)


def test_a_signal_while_torch_starts_the_ranks_leaves_none_behind(tmp_path, monkeypatch, capfd):
    """It has no name yet for those that it has started."""
    started, before = [], {each: signal.getsignal(each) for each in [*STOPPING, signal.SIGQUIT]}

    class Signalled(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess_handler, "Popen", Signalled)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    try:
        assert launcher(tmp_path, sleep, 2).run() == 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(started) == 2 and not any(map(psutil.pid_exists, started))
    assert "stopped   by SIGTERM before it could save" in capfd.readouterr().out


def test_an_error_of_a_launcher_is_one_line(ending):
    code, said = ending(OSError(24, "Too many open files"))
    line = "error: the launcher on n1 failed: OSError: [Errno 24] Too many open files\n"
    assert code == 1 and said.endswith(line)


def test_what_torch_prints_in_a_launcher_is_kept_in_a_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    before = os.dup(2)
    try:
        keep_apart(tmp_path / "logs" / "launcher-n1.log")
        os.write(2, b"frame #0: c10::Error\n")
        say("error: of this package", error=True)
        sys.stderr.close()
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert (tmp_path / "logs" / "launcher-n1.log").read_text() == "frame #0: c10::Error\n"
    assert capfd.readouterr() == ("", "error: of this package\n")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see what is imported")
def test_a_signal_to_a_rank_that_imports_torch_prints_nothing():
    """Ctrl-C, as its launcher passes it on."""
    command = [sys.executable, "-m", "torchmars.train", "quickstart.toml"]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while "libtorch" not in Path(f"/proc/{rank.pid}/maps").read_text():
        assert rank.poll() is None
    rank.send_signal(signal.SIGINT)
    assert rank.communicate() == ("", None)
    assert rank.returncode == -signal.SIGINT
