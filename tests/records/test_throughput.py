"""What is known of devices."""

import pytest
import torch

from torchmars.planning.plan import MEMORY
from torchmars.records.gpus import GIB
from torchmars.records.speed import mfu_note, peak_flops, peak_memory


@pytest.mark.parametrize(
    "name,flops",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),  # not an H200 of SXM
        ("NVIDIA L40", 181e12),  # not an L4
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H20", 148e12),  # not an H200
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA L40G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100-SXM-64GB", None),  # of Leonardo, with more cores
        ("NVIDIA H200 MIG 3g.71gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(monkeypatch, name, flops):
    """A name is known as a whole. A run says once where it knows no peak."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    note = f"no MFU is reported: the peak of this GPU is not known ({name})"
    assert (peak_flops(device), mfu_note(device)) == (flops, None if flops else note)


def test_a_cpu_has_no_known_peak_but_memory():
    device = torch.device("cpu")
    assert peak_flops(device) is mfu_note(device) is None
    assert 0 < peak_memory(device) < 1e4


def test_a_plan_counts_on_an_h100_less_what_its_system_takes():
    assert MEMORY == 72 * GIB
