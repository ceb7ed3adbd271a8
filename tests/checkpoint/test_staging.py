"""What a save asks of a GPU, in its order: told by a device that only writes down what it is told.

tests/gpu/test_training.py has what a GPU makes of it.
"""

import contextlib

import pytest
import torch

from torchmars.checkpoint.staging import Staging


class Device:
    """The order of what streams, events and copies are told."""

    def __init__(self, monkeypatch, kind):
        self.told = []
        module = torch.get_device_module(kind)
        monkeypatch.setattr(module, "Stream", lambda: Stream(self, "copies"))
        monkeypatch.setattr(module, "current_stream", lambda: Stream(self, "training"))
        monkeypatch.setattr(module, "stream", self.stream)
        monkeypatch.setattr(module, "Event", self.event)

    @contextlib.contextmanager
    def stream(self, stream):
        self.told.append(f"on {stream.name}:")
        yield
        self.told.append("end")

    def event(self, blocking):
        assert blocking  # the thread that waits leaves its core to others
        return Event(self)


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.device.told.append(f"{self.name} wait for {other.name}")

    def wait_event(self, event):
        assert event.recorded
        self.device.told.append(f"{self.name} waits for the event")


class Event:
    def __init__(self, device):
        self.device, self.recorded = device, False

    def record(self):
        self.recorded = True
        self.device.told.append("event")

    def synchronize(self):
        self.device.told.append("the host waits for the event")


@pytest.mark.filterwarnings("ignore:Ignoring pin_memory")
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_gpu_copies_beside_training_until_something_changes(monkeypatch, kind):
    device = Device(monkeypatch, kind)
    staging = Staging(torch.device(kind))
    tensors = {"weight": torch.rand(8), "step": torch.tensor(1.0)}
    stage = staging.stager.stage

    def told_stage(tensors, non_blocking):
        assert non_blocking
        device.told.append(" ".join(tensors))
        return stage(tensors, non_blocking)

    staging.stager.stage = told_stage
    staging.before_change()
    assert device.told == []  # nothing was copied yet
    copies, complete = staging.copy(tensors)
    begun = ["copies wait for training", "on copies:", "step weight", "event", "end"]
    assert device.told == begun  # and the host waited for nothing
    assert list(copies) == list(tensors)
    staging.before_change()
    staging.before_change()
    complete()
    assert device.told[5:] == ["training waits for the event", "the host waits for the event"]


def test_a_cpu_copies_at_once():
    staging = Staging(torch.device("cpu"))
    tensors = {"weight": torch.rand(8), "step": torch.tensor(1.0)}
    were = {name: value.clone() for name, value in tensors.items()}
    copies, complete = staging.copy(tensors)
    staging.before_change()
    for value in tensors.values():
        value.zero_()
    complete()
    assert all(torch.equal(copies[name], were[name]) for name in tensors)
