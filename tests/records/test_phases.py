"""Where the time of a step goes."""

import time

import pytest
import torch

from torchmars.records.speed import PAUSED, PhaseClock


@pytest.fixture
def now(monkeypatch):
    """The time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def spend(clock, now, *spans):
    for phase, seconds in spans:
        clock.enter(phase)
        now[0] += seconds


def test_each_moment_is_in_one_phase(now):
    clock = PhaseClock(torch.device("cpu"))
    now[0] += 0.5
    spend(clock, now, ("forward", 1), ("backward", 2), ("forward", 1), (PAUSED, 50))
    spend(clock, now, ("backward", 3), ("optimizer", 0.25))
    expected = {"other": 250, "forward": 1000, "backward": 2500, "optimizer": 125}
    assert clock.milliseconds(steps=2) == expected
    clock.restart()
    now[0] += 4  # of the phase that went on
    assert clock.milliseconds(steps=1)["optimizer"] == 4000


class Event:
    """What a GPU tells of: `done` moments have come, one after the other, 2 s apart."""

    done = 0
    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        type(self).recorded += 1
        self.number = self.recorded

    def query(self):
        return self.number <= self.done

    def elapsed_time(self, other):
        assert other.query(), "a step would wait for the device"
        return 2000.0 * (other.number - self.number)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_on_a_gpu_only_what_is_done_is_read(monkeypatch, kind):
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "done", 0)
    monkeypatch.setattr(torch.get_device_module(kind), "Event", Event)
    clock = PhaseClock(torch.device(kind))
    for phase in ("forward", "backward", "optimizer"):
        clock.enter(phase)
    assert clock.milliseconds(1) == {}
    Event.done = 3
    assert clock.milliseconds(1) == {"other": 2000, "forward": 2000}
    Event.done = Event.recorded
    clock.enter("data")
    assert len(clock.entered) == 2  # no more is kept
