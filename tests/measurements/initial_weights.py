"""Measure how long a rank draws its initial weights, and the memory it takes for that.

    python -m tests.measurements.initial_weights

Each case is the first rank of a world that is not there (torch's fake process group), in a process
of its own with one thread. Times are of the CPU. "Whole tensors" is what drawing all weights with
torch's generator takes, extrapolated from one matrix.
"""

import multiprocessing
import resource
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchmars.models.initialize import init_weights

# Layers, width, inner width of the MLP. 8 key-value heads of 128, 128,256 tokens.
SIZES = {"Llama-3 8B": (32, 4096, 14336), "Llama-3 70B": (80, 8192, 28672)}
RANKS = ((64, 1), (512, 1), (8, 8), (64, 8))  # FSDP, tensor parallelism
CUTS = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")},
    "tables.*": ColwiseParallel(),
}


class Matrices(nn.Module):
    """The matrices of Llama 3."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        shapes = {
            **dict.fromkeys(("q", "o"), (width, width)),
            **dict.fromkeys(("k", "v"), (width, 1024)),
            **dict.fromkeys(("gate", "up"), (width, inner)),
            "down": (inner, width),
        }
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(layers)
        )
        self.tables = nn.ModuleDict(
            {name: nn.Linear(width, 128256, bias=False) for name in ("embed", "head")}
        )

    def init_std(self, name: str) -> float:
        return 0.02


def measure(size: str, fsdp: int, tensor_parallel: int) -> tuple[float, int, int]:
    """Return seconds of CPU time, bytes of the rank's weights, and of memory beyond at the peak."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=fsdp * tensor_parallel)
    mesh = init_device_mesh("cpu", (fsdp, tensor_parallel), mesh_dim_names=("fsdp", "tp"))
    with torch.device("meta"):
        model = Matrices(*SIZES[size])
    if tensor_parallel > 1:
        parallelize_module(model, mesh["tp"], CUTS)
    fully_shard(model, mesh=mesh["fsdp"])
    model.to_empty(device="cpu")
    parts = [parameter.to_local().detach().zero_() for parameter in model.parameters()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    init_weights(model, seed=0)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, sum(part.nbytes for part in parts), 1024 * (peak - before)


def seconds_per_value() -> float:
    """Return the seconds of CPU time that torch's generator needs for a value."""
    torch.set_num_threads(1)
    whole = torch.zeros(4096, 4096)
    began = time.process_time()
    whole.normal_(generator=torch.Generator())
    return (time.process_time() - began) / whole.numel()


def main() -> None:
    pool = multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1)
    each = pool.apply(seconds_per_value)
    print("| model | ranks | FSDP x TP | CPU seconds | weights, MB | memory beyond, MB |")
    print("|---" * 6 + "|")
    for size, shape in SIZES.items():
        for fsdp, tensor_parallel in RANKS:
            seconds, weights, beyond = pool.apply(measure, (size, fsdp, tensor_parallel))
            print(
                f"| {size} | {fsdp * tensor_parallel} | {fsdp} x {tensor_parallel} | "
                f"{seconds:.2f} | {weights / 1e6:,.0f} | {beyond / 1e6:.1f} |",
                flush=True,
            )
        with torch.device("meta"):
            numels = [parameter.numel() for parameter in Matrices(*shape).parameters()]
        print(
            f"| {size} | any | whole tensors | {sum(numels) * each:.0f} (extrapolated) | | "
            f"{4 * max(numels) / 1e6:,.0f} |"
        )


if __name__ == "__main__":
    main()
