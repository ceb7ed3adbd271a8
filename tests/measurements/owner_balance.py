"""Measure how evenly whole matrices are dealt out over ranks, from the plan alone.

    python -m tests.measurements.owner_balance

For each model and number of FSDP ranks it prints the largest over the mean orthogonalisation work
of a rank, and the seconds of CPU time that one rank needs to plan. It builds no model and starts no
process.
"""

import time

from torch.distributed.tensor import Shard

from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS
from torchmars.optim.matrices.owners import plan_buckets, rank_bucket
from torchmars.optim.matrices.shapes import MatrixShape, extents_of_shards
from torchmars.optim.meshes import MeshPlace

RANKS = (2, 8, 64, 512)
KINDS = {None: "-", False: "fused", True: "split"}


def gpt2(layers: int, width: int, split: bool) -> list[MatrixShape]:
    qkv = MatrixShape((3 * width, width), split=3 if split else 1)
    return [
        qkv,
        *map(MatrixShape, ((width, width), (4 * width, width), (width, 4 * width))),
    ] * layers


def llama3(layers: int, width: int, inner: int, split: bool) -> list[MatrixShape]:
    """Return the shapes of Llama 3: 8 key-value heads of 128; q, k and v are one fused weight."""
    parts = (width, 1024, 1024)
    qkv = MatrixShape((sum(parts), width), split=parts if split else 1)
    return [
        qkv,
        *map(MatrixShape, ((width, width), (inner, width), (inner, width), (width, inner))),
    ] * layers


def qwen3_experts(layers: int, width: int, inner: int, split: None) -> list[MatrixShape]:
    """Return the shapes of Qwen3's experts: whole ones lie on up to 128 ranks."""
    stacks = (128, inner, width), (128, inner, width), (128, width, inner)
    return [*map(MatrixShape, stacks)] * layers


def main() -> None:
    flops = ORTHOGONALIZERS["newton-schulz"].flops
    models = {
        "GPT-2 small": (gpt2, 12, 768),
        "GPT-2 XL": (gpt2, 48, 1600),
        "Llama-3 8B": (llama3, 32, 4096, 14336),
        "Llama-3 70B": (llama3, 80, 8192, 28672),
        "Qwen3 30B-A3B, experts": (qwen3_experts, 48, 2048, 768),
        "Qwen3 235B-A22B, experts": (qwen3_experts, 94, 4096, 1536),
    }
    print(
        "| model | QKV | units | "
        + " | ".join(f"{ranks} ranks" for ranks in RANKS)
        + " | floor at 512 | s to plan at 512 |"
    )
    print("|---" * (len(RANKS) + 5) + "|")
    for name, (build, *arguments) in models.items():
        for split in (None,) if build is qwen3_experts else (False, True):
            shapes = build(*arguments, split)
            cells = []
            for ranks in RANKS:
                began = time.process_time()
                loads: dict[int, int] = {}
                coordinates = [[rank] for rank in range(ranks)]
                place = MeshPlace(list(range(ranks)), (ranks,), coordinates, 0, 0, None, None)
                extents = extents_of_shards(shapes, [(Shard(0),)] * len(shapes), place)
                plan = plan_buckets(shapes, extents, flops, range(ranks), loads)
                for planned in plan:
                    rank_bucket(planned, extents, place)
                seconds = time.process_time() - began
                cells.append(f"{max(loads.values()) * ranks / sum(loads.values()):.2f}")
            units = [units for planned in plan for units, _ in planned.owners]
            # No plan is better than the largest unit on a rank of its own.
            costs = [flops(*each.shape) for each in units for _ in range(each.length)]
            floor = max(costs) * ranks / sum(costs)
            print(
                f"| {name} | {KINDS[split]} | {len(costs)} | "
                + " | ".join(cells)
                + f" | {max(floor, 1):.2f} | {seconds:.2f} |"
            )


if __name__ == "__main__":
    main()
