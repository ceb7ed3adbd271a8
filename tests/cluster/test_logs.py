"""What ranks print, on its way to the console and to files."""

import os
import pty
from collections import deque

from torchmars.cluster.logs import Stream


def test_what_a_rank_prints_does_not_steer_a_terminal(tmp_path):
    """Its log has all bytes; a letter that comes in two parts is shown whole."""
    inside, outside = pty.openpty()
    said = "50%\r100% größer \x1b]0;title\x07\u202e\n".encode() + b"\x9b2J\n"
    for number, marked in enumerate((False, True)):
        file = tmp_path / f"{number}.log"
        stream = Stream(file, "a | ", outside, marked, deque())
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
