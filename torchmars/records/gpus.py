"""Figures of GPUs from the makers' data sheets."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU's figures from the maker's data sheet."""

    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    memory_gib: int


# By a part of the name that CUDA gives. The first one that fits counts.
GPUS = {
    "H200": Gpu(989e12, 141),
    "H100 PCIe": Gpu(756e12, 80),
    "H100 NVL": Gpu(835e12, 94),
    "H100": Gpu(989e12, 80),
    "B200": Gpu(2250e12, 180),
    "A100-SXM4-40GB": Gpu(312e12, 40),
    "A100-PCIE-40GB": Gpu(312e12, 40),
    "A100": Gpu(312e12, 80),
    "L40S": Gpu(362e12, 48),
    "A10G": Gpu(70e12, 24),
    "L4": Gpu(121e12, 24),
    "V100-SXM2-16GB": Gpu(125e12, 16),
    "V100": Gpu(125e12, 32),
}
