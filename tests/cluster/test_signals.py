"""Signals that stop a run, as its ranks take them."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from torchmars.cluster import process
from torchmars.cluster.process import StopSignals
from torchmars.training.trainer import StepFlags, Trainer


def test_the_echo_of_a_launcher_is_no_second_signal(monkeypatch):
    """Nor one that the main thread takes late: our launcher ends its ranks by SIGKILL."""
    ended = []
    monkeypatch.delenv(process.LAUNCHER, raising=False)
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = StopSignals()
    monkeypatch.setattr("torchmars.cluster.process.ECHO_SECONDS", 3600)
    for _ in range(2):
        signals._receive(signal.SIGTERM)
    assert signals.received == "SIGTERM" and not ended
    monkeypatch.setattr("torchmars.cluster.process.ECHO_SECONDS", -1)
    with monkeypatch.context() as under:
        under.setenv(process.LAUNCHER, "1")
        signals._receive(signal.SIGTERM)
        assert not ended
    signals._receive(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


@pytest.mark.parametrize(
    "fewest,asked,seconds,flags",
    [
        ("", "", 0, ["stop"]),
        ("1", "", 0, []),  # its launcher will ask
        ("1", "memory SIGTERM", 60, ["regroup"]),  # after a long step
        ("1", "stop SIGTERM", 0, ["stop"]),
        ("1", "", 60, ["stop"]),  # a signal for this rank alone
    ],
)
def test_what_a_signal_asks_of_a_rank_is_for_its_launcher_to_say_where_others_may_go_on(
    tmp_path, monkeypatch, fewest, asked, seconds, flags
):
    (tmp_path / "asked").write_text(asked)
    monkeypatch.setenv(process.FEWEST, fewest)
    monkeypatch.setenv(process.ASKED, str(tmp_path / "asked"))
    signals = SimpleNamespace(received="SIGTERM", received_at=time.monotonic() - seconds)
    layout = SimpleNamespace(first=False, exchange_flags=lambda *flags: StepFlags(*flags))
    told = Trainer.exchange_flags(SimpleNamespace(signals=signals, layout=layout))
    assert [name for name, value in vars(told).items() if value] == flags


def test_afterwards_the_handlers_are_those_of_before():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        while signals.received is None:
            time.sleep(0.01)
        assert signals.received == "SIGUSR1"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
