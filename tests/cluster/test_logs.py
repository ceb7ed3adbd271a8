"""What ranks print, on its way to the console and to files."""

import gc
import io
import os
import sys

import pytest

from tests.support.commands import needs_proc
from torchmars.cluster.failures import RankLogs
from torchmars.core import console


@pytest.fixture
def output(tmp_path):
    """Print on outputs of the ranks of one start; return what each rank's log has then."""

    def output(*printed, shown=(0,), ranks=1):
        logs = RankLogs(tmp_path / "logs", tmp_path, {*shown})
        envs = {each: {"RANK": str(each), "WORLD_SIZE": str(ranks)} for each in range(ranks)}
        places = logs.reify(envs)
        for rank, number, text in printed:
            with open((places.stdouts, places.stderrs)[number - 1][rank], "wb") as stream:
                stream.write(text)
        logs.close()
        return [logs.file(rank).read_bytes() for rank in range(ranks)]

    return output


def test_a_terminal_is_not_steered_and_the_log_has_all_bytes(output, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    said = "größer \x1b]0;title\x07\u202e\n".encode() + b"\x9b2J\n"
    (log,) = output((0, 1, said))
    assert log.endswith(said)
    assert terminal.getvalue() == "größer \\x1b]0;title\\x07\\u202e\n\ufffd2J\n"


def test_a_quiet_console_gets_warnings_and_errors_and_the_log_has_all(output, monkeypatch, capsys):
    monkeypatch.setattr(console, "quiet", True)
    (log,) = output((0, 1, b"step 3\nwarning: b\n"), (0, 2, b"step 4\n"))
    assert capsys.readouterr() == ("warning: b\n", "step 4\n")
    assert b"step 3\nwarning: b\n" in log


def test_a_traceback_goes_to_the_log_alone(output, capsys):
    """The launcher says in a line how the rank failed."""
    traceback = b"[rank1]: Traceback (most recent call last):\n[rank1]: Error\n"
    logs = output((1, 2, traceback), (0, 1, b"a\n"), (1, 1, b"b"), shown=(0, 1), ranks=2)
    out, err = capsys.readouterr()
    assert err == "" and {*out.splitlines()} == {f"{console_name(0)}a", f"{console_name(1)}b"}
    assert traceback in logs[1] and logs[1].endswith(b"b\n")


def console_name(rank):
    return f"{os.environ.get('SLURMD_NODENAME') or os.uname().nodename} rank {rank} | "


@needs_proc
def test_starts_keep_nothing_open_and_lose_no_line(tmp_path):
    """A run of a month may start its ranks many times."""
    gc.collect()  # files that other tests have left
    logs = RankLogs(tmp_path / "logs", tmp_path, set())
    opened = []
    for start in range(4):
        envs = {rank: {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)}
        places = logs.reify(envs)
        for rank in range(2):
            with open(places.stdouts[rank], "w") as stream:
                stream.write(f"start {start}")  # a rank that is killed ends no line
        opened.append(len(os.listdir("/proc/self/fd")))
    logs.close()
    assert len({*opened}) == 1 and len(os.listdir("/proc/self/fd")) < opened[0]
    for rank in range(2):
        lines = logs.file(rank).read_text().splitlines()
        assert [line for line in lines if line[:3] != "---"] == [f"start {n}" for n in range(4)]
