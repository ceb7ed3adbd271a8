"""Which GPUs there are, and what their maker calls his own. Machines and makers are made up."""

import pytest
import torch

from torchmars.checkpoint.state_dict import rng_state, set_rng_state
from torchmars.cluster import failures
from torchmars.core import device
from torchmars.core.device import (
    Maker,
    backend_of,
    gpu_count,
    gpu_name,
    gpu_type,
    is_gpu,
    limited_to,
    visible_gpus,
)

OTHER = Maker("xccl", "ZE_AFFINITY_MASK", {}, {})


@pytest.fixture(params=["cuda", "xpu"])
def machine(request, monkeypatch):
    """The type of the three GPUs of a machine."""
    kind = request.param
    monkeypatch.setitem(device.MAKERS, "xpu", OTHER)
    given = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: given)
    module = torch.get_device_module(kind)
    answers = {"is_available": True, "device_count": 3, "get_rng_state": torch.arange(4)}
    for name, answer in answers.items():
        monkeypatch.setattr(module, name, lambda answer=answer: answer)
    monkeypatch.setattr(module, "get_device_name", lambda number: f"{kind} number {number}")
    monkeypatch.delenv(device.MAKERS[kind].visible, raising=False)
    return kind


def test_the_gpus_of_a_machine(machine, monkeypatch):
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}[machine]
    assert (gpu_type(), gpu_count(), gpu_name(2)) == (machine, 3, f"{machine} number 2")
    assert visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv(variable, "4,6,7")
    assert visible_gpus() == ["4", "6", "7"]
    assert limited_to("4,6") == {variable: "4,6"} and limited_to("") == {}
    assert is_gpu(machine) and not is_gpu("cpu") and not is_gpu("meta")


def test_torch_knows_the_backend(machine):
    known = torch.distributed.get_default_backend_for_device
    assert (backend_of(machine), backend_of("cpu")) == (known(machine), known("cpu"))


def test_a_torch_whose_gpus_are_not_there_uses_the_cpu(machine, monkeypatch):
    module = torch.get_device_module(machine)
    monkeypatch.setattr(module, "is_available", lambda: False)
    monkeypatch.setattr(module, "device_count", lambda: 0)
    assert (gpu_type(), gpu_count(), gpu_name(0), visible_gpus()) == (None, 0, "cpu", [])


def test_gpus_of_an_unknown_maker_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    assert (gpu_type(), gpu_count(), visible_gpus(), limited_to("0")) == (None, 0, [], {})


def test_random_numbers_of_a_gpu_are_kept_under_its_type(machine, monkeypatch):
    """Under "rng.cuda" in the checkpoints that there are."""
    restored = []
    monkeypatch.setattr(torch.get_device_module(machine), "set_rng_state", restored.append)
    state = rng_state(5)
    assert list(state) == ["rng.cpu.5", f"rng.{machine}.5"]
    set_rng_state(state)
    assert [each.tolist() for each in restored] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("error", ["NCCL error in: socket.cpp", "ncclRemoteError", "[Gloo] late"])
def test_errors_of_collectives_are_known_by_their_library(error):
    assert failures.FALLOUT_MESSAGE.search(error)
