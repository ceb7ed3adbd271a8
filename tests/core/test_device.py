"""Which GPUs there are. The machine is made up."""

import pytest
import torch

from torchmars.checkpoint.state_dict import rng_state, set_rng_state
from torchmars.cluster import failures
from torchmars.core.device import (
    VISIBLE,
    gpu_type,
    is_gpu,
    visible_gpus,
)


@pytest.fixture
def machine(monkeypatch):
    """A machine with three GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"number {number}")
    monkeypatch.delenv(VISIBLE, raising=False)


def test_the_gpus_of_a_machine(machine, monkeypatch):
    assert gpu_type() == "cuda"
    assert visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv(VISIBLE, "4,6,7")
    assert visible_gpus() == ["4", "6", "7"]
    assert is_gpu("cuda") and not is_gpu("cpu") and not is_gpu("meta")


def test_a_torch_whose_gpus_are_not_there_uses_the_cpu(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (gpu_type(), visible_gpus()) == (None, [])


def test_random_numbers_of_a_gpu_are_kept_under_its_type(machine, monkeypatch):
    """Under "rng.cuda" in the checkpoints that there are."""
    restored = []
    given = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: given)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(4))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = rng_state(5)
    assert list(state) == ["rng.cpu.5", "rng.cuda.5"]
    set_rng_state(state)
    assert [each.tolist() for each in restored] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("error", ["NCCL error in: socket.cpp", "ncclRemoteError", "[Gloo] late"])
def test_errors_of_collectives_are_known_by_their_library(error):
    assert failures.FALLOUT_MESSAGE.search(error)
