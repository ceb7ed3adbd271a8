"""What ranks print, on its way to the console and to files."""

import logging
import os
import pty
import shutil
from collections import deque

from tests.support.commands import needs_proc
from torchmars.cluster.logs import RankLogs, RankOutput
from torchmars.core import console


def test_what_a_rank_prints_does_not_steer_a_terminal(tmp_path):
    """Its log has all bytes; a letter that comes in two parts is shown whole."""
    inside, outside = pty.openpty()
    said = "50%\r100% größer \x1b]0;title\x07\u202e\n".encode() + b"\x9b2J\n"
    for number, marked in enumerate((False, True)):
        file = tmp_path / f"{number}.log"
        stream = RankOutput(file, "a | ", outside, marked, deque())
        for part in (said[:13], said[13:14], said[14:]):
            stream.write(part)
        shown = b""
        while shown.count(b"\n") < 2:
            shown += os.read(inside, 2**16)
        prefix = "a | " if marked else ""
        assert shown.decode().split("\r\n") == [
            f"{prefix}50%\r100% größer \\x1b]0;title\\x07\\u202e",
            f"{prefix}\\x9b2J",
            "",
        ]
        logged = file.read_bytes()
        assert all(line in logged for line in said.split(b"\n"))
    os.close(inside)
    os.close(outside)


def test_logs_that_are_deleted_begin_anew(tmp_path):
    """A run folder that is gone stays so."""
    folder = tmp_path / "run" / "logs"
    folder.mkdir(parents=True)
    files = [folder / "rank-0.log", folder / "rank-0.log", folder / "rank-1.log"]
    streams = [RankOutput(file, "", None, False, deque()) for file in files]

    def write(text):
        for stream in streams:
            stream.write(text + b"\n")
        return [file.read_text().split()[2::3] if file.exists() else None for file in files[1:]]

    assert write(b"a") == [["a", "a"], ["a"]]
    shutil.rmtree(folder)
    assert write(b"b") == [["b", "b"], ["b"]]
    files[2].unlink()
    assert write(b"c") == [["b", "b", "c", "c"], ["c"]]
    shutil.rmtree(tmp_path / "run")
    assert write(b"d") == [None, None]
    for stream in streams:
        stream.close()


def test_a_quiet_console_gets_warnings_and_errors_and_the_log_has_all(tmp_path, caplog, capfd):
    caplog.set_level(logging.WARNING, console.logger.name)
    for descriptor, marked in ((1, False), (2, False), (1, True)):
        output = RankOutput(tmp_path / "0.log", "a | ", descriptor, marked, deque())
        for part in (b"step 3\nwarn", b"ing: b\n"):
            output.write(part)
    assert capfd.readouterr() == ("warning: b\na | warning: b\n", "step 3\nwarning: b\n")
    assert (tmp_path / "0.log").read_text().count("a | step 3\n") == 3


def test_a_traceback_goes_to_the_log_alone(tmp_path, capfd):
    """The launcher says in a line how the rank failed."""
    traceback = b"[rank1]: Traceback (most recent call last):\n[rank1]:   File 1\n"
    for number, marked in enumerate((False, True)):
        file = tmp_path / f"{number}.log"
        output = RankOutput(file, "a | ", 2, marked, deque())
        for part in (b"a bar 1%\ra bar", b" 2%\n", traceback, b"[rank1]: Err", b"or\nafter it\n"):
            output.write(part)
        shown = capfd.readouterr().err
        assert "rank1" not in shown and "or\n" not in shown
        assert shown.count("a bar 2%\n") == 1 and shown.endswith("after it\n")
        assert [line in file.read_bytes() for line in traceback.splitlines()] == [True, True]
        assert b"[rank1]: Error\n" in file.read_bytes()


@needs_proc
def test_starts_keep_nothing_open_and_lose_no_line(tmp_path):
    """A run of a month may start its ranks many times."""
    logs = RankLogs(tmp_path / "logs", tmp_path, set())
    env = {"MASTER_ADDR": "n", "MASTER_PORT": "1", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_RUN_ID": "a"}
    opened = []
    for start in range(4):
        own = {"TORCHELASTIC_RESTART_COUNT": str(start)}
        places = logs.reify({rank: env | own | {"RANK": str(rank)} for rank in range(2)})
        for rank in range(2):
            with open(places.stdouts[rank], "w") as stream:
                stream.write(f"start {start}")  # a rank that is killed ends no line
        opened.append(len(os.listdir("/proc/self/fd")))
    logs.close()
    assert len({*opened}) == 1 and len(os.listdir("/proc/self/fd")) < opened[0]
    for rank in range(2):
        lines = logs.file(rank).read_text().splitlines()
        assert [line[-7:] for line in lines] == [f"start {start}" for start in range(4)]
