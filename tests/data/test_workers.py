"""Processes that tokenise, whose starter dies."""

import os
import pickle
import signal
import subprocess
import sys

import pytest

from torchmars.data.documents import Encoder, TextBlock, TextPart
from torchmars.data.workers import start_worker

ENCODER = Encoder("text", "text", "bytes", 0.1, "uint16", 2**20)
BLOCK = TextBlock([TextPart("a.txt", b"words " * 50_000, 0)], (0, 0, 0), 0)


@pytest.mark.parametrize("part", [0, 10, 0.5], ids=["nothing", "an-encoder", "half-a-block"])
def test_a_worker_whose_starter_dies_in_the_middle_of_a_word_prints_nothing(part):
    said = pickle.dumps(ENCODER), pickle.dumps(BLOCK)
    given = said[0][:part] if isinstance(part, int) else said[0] + said[1][: len(said[1]) // 2]
    ended = subprocess.run(
        [sys.executable, "-m", "torchmars.data.workers"], input=given, capture_output=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_worker_that_nobody_hears_prints_nothing():
    """Its result is larger than what a pipe holds, and what is left is not written at the end."""
    command = [sys.executable, "-m", "torchmars.data.workers"]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    worker.stdout.close()
    worker.stdin.write(pickle.dumps(ENCODER) + pickle.dumps(BLOCK))
    worker.stdin.close()
    assert (worker.stderr.read(), worker.wait()) == (b"", 0)
    worker.stderr.close()


def test_ctrl_c_is_for_the_process_that_starts_a_worker():
    with start_worker(ENCODER) as worker:
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
        worker.send_signal(signal.SIGKILL)
