"""How a launcher ends, and what of it the console gets."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchmars.cluster import launcher
from torchmars.cluster.logs import RankLogs, keep_apart
from torchmars.commands.launch import parse_torchrun
from torchmars.core.console import say
from torchmars.core.errors import EXIT_STOPPED, EXIT_UNCONNECTED

LOST = DistNetworkError("failed to recv, got 0 bytes\nframe #0: c10::Error::Error(...)")


@pytest.fixture
def ending(tmp_path, monkeypatch, capsys):
    """Let a launcher end as torchrun raises, after a rank has left an exit code, or none has."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def end(error, left=None):
        def start(*config):
            raise error

        monkeypatch.setattr(rendezvous_handler_registry, "_registry", {})
        logs = RankLogs(tmp_path / "logs", tmp_path, {0})
        logs.launch = "n1-1234"
        logs.exit_code_file.write_text("" if left is None else str(left))
        args = parse_torchrun(["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "script"])
        code = launcher.launch(
            args, logs, tmp_path / "hang", 0, lambda failure: None, lambda: 0, start
        )
        out, err = capsys.readouterr()
        return code, out + err

    return end


def test_a_launcher_whose_ranks_have_saved_says_what_it_has_lost(ending):
    code, said = ending(LOST, EXIT_STOPPED)
    assert code == EXIT_STOPPED and said == (
        "stopped   and saved: n1 has lost the other machines (failed to recv, got 0 bytes); "
        "the same command resumes\n"
    )
    assert ending(LOST, 0) == (0, "")  # where the run is complete, the other machine is just done
    assert ending(LOST) == (
        EXIT_UNCONNECTED,
        "error: n1 has lost the other machines: failed to recv, got 0 bytes\n",
    )


def test_a_signal_before_any_rank_could_save_is_one_line(ending):
    stopped = SignalException("death signal", signal.SIGINT)
    line = "stopped   by SIGINT before it could save; the same command resumes\n"
    assert ending(stopped) == (130, line)
    assert ending(stopped, EXIT_STOPPED) == (EXIT_STOPPED, "")  # the rank has said so


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
