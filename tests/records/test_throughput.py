"""What is known of devices."""

import pytest
import torch

from torchmars.planning.plan import MEMORY
from torchmars.records.gpus import GIB
from torchmars.records.speed import peak_flops, peak_memory


@pytest.mark.parametrize(
    "name,flops",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == flops


def test_a_cpu_has_no_known_peak_but_memory():
    device = torch.device("cpu")
    assert peak_flops(device) is None
    assert 0 < peak_memory(device) < 1e4


def test_a_plan_counts_on_an_h100_less_what_its_system_takes():
    assert MEMORY == 72 * GIB
