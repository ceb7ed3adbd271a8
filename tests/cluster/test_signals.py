"""Signals that stop a run, for a rank whose main thread is in a wait of C++ that never ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from torchmars.cluster.process import StopSignals

STUCK = """
import datetime, threading, time
import torch.distributed as dist
from torchmars.cluster import process as module
from torchmars.cluster.process import StopSignals

module.ECHO_SECONDS = 0

def tell(signals):
    while signals.received is None:
        time.sleep(0.01)
    print(signals.received, flush=True)

store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
with StopSignals() as signals:
    threading.Thread(target=tell, args=(signals,), daemon=True).start()
    threading.Timer(0.5, lambda: print("waits", flush=True)).start()
    store.wait(["never"], datetime.timedelta(days=1))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_rank_that_waits_in_a_collective(number):
    rank = subprocess.Popen([sys.executable, "-c", STUCK], text=True, stdout=subprocess.PIPE)
    try:
        assert rank.stdout.readline() == "waits\n"
        rank.send_signal(number)
        assert rank.stdout.readline() == f"{number.name}\n"
        rank.send_signal(number)
        assert rank.wait(timeout=600) == 128 + number
    finally:
        rank.kill()
        rank.wait()


def test_the_echo_of_a_launcher_is_no_second_signal(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = StopSignals()
    monkeypatch.setattr("torchmars.cluster.process.ECHO_SECONDS", 3600)
    for _ in range(2):
        signals._receive(signal.SIGTERM)
    assert signals.received == "SIGTERM" and not ended
    monkeypatch.setattr("torchmars.cluster.process.ECHO_SECONDS", -1)
    signals._receive(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_afterwards_the_handlers_are_those_of_before():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        while signals.received is None:
            time.sleep(0.01)
        assert signals.received == "SIGUSR1"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert signal.set_wakeup_fd(-1) == -1
