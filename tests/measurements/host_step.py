"""Print what a step costs the host of a GPU, on a machine without one: ours beside the plain loop.

    python -m tests.measurements.host_step [--ranks 1 2 8] [--only plain mars-adamw]

A GPT-2 of 12 layers, so narrow that its tensors cost little, in bfloat16 in both loops. What the
code does on GPUs alone is forced on the CPU, see `forced`; it is an error if that is not there. Of
several ranks there is one: its collectives return at once.

The numbers are CPU milliseconds, the least of 12 steps, and all loops take turns. "With data" are
the same steps where a thread reads 2 x 8 windows of 1,024 tokens meanwhile. Triton launches
by a driver that starts nothing: its own Python counts. What CUDA's driver and NCCL take is not in
the numbers, nor are FSDP's streams and events. Products of narrow matrices are: about 10 us each
on a CPU, which is what the launch of one takes. Measure on a quiet machine: what others do there
slows the plain loop more than the others.
"""

import argparse
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

from tests.gpu.models import Loop, ours, plain
from tests.support.layouts import simulated_layout
from tests.support.shards import write_shards
from torchmars.config import DataConfig, model_config
from torchmars.data.loader import Loader, close_all
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.data.windows import MixedWindows, Windows
from torchmars.optim import mars
from torchmars.optim.matrices import agreement, exchange, owners
from torchmars.parallel import cuts, fsdp, graphs
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

Step = Callable[[], object]
RULES = ["adamw", "mars-adamw", "mars-m"]
TURNS, STEPS = 3, 4
WIDTH, WIDTH_OF_SMALL = 16, 768
NARROWER = (WIDTH / WIDTH_OF_SMALL) ** 2  # the elements of a matrix, to those of GPT-2 small's
SHAPE = {"n_head": 2, "n_embd": WIDTH}
GPT2 = model_config(name="gpt2", size="small", n_layer=12, **SHAPE)
LLAMA = model_config(name="llama", size="8b", n_layer=32, n_kv_head=1, n_inner=56, **SHAPE)
TENSORS = {"gpt2": 75, "llama": 291}


class Forced(NamedTuple):
    """What a GPU decides otherwise than a CPU: a name of a module or class, and its value there."""

    owner: Any
    name: str
    value: Any


def units_of(ranks: int) -> int:
    """Return how many units of FSDP GPT-2 small has on a GPU: blocks by fours or so, and the rest.

    One rank has none.
    """
    return 4 if ranks > 1 else 0


def forced() -> list[Forced]:
    """Return all that is forced."""
    return [
        Forced(mars, "has_launches", lambda device: True),
        Forced(graphs, "MOST_BLOCKS", {"cpu": graphs.MOST_BLOCKS["cuda"]}),
        # As many units, buckets and batches as GPT-2 small has.
        Forced(cuts, "ONE_UNIT_BYTES", -1),
        Forced(fsdp, "UNIT_BYTES", {"cpu": int(fsdp.UNIT_BYTES["cuda"] * NARROWER)}),
        Forced(owners, "BUCKET_ELEMENTS", int(owners.BUCKET_ELEMENTS * NARROWER)),
        Forced(exchange, "BATCH_OF_CPU_THREAD", int(exchange.BATCH_ELEMENTS * NARROWER)),
        # Their launches cost the host as much in any dtype, and a CPU computes longest in bfloat16.
        Forced(agreement, "multiplies_bfloat16", lambda device: False),
        # There is one rank, and nobody to agree with.
        Forced(agreement, "_least", lambda values, *_: values),
    ]


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let the body decide as on a GPU."""
    with contextlib.ExitStack() as stack:
        try:
            for each in forced():
                stack.enter_context(mock.patch.object(*each))
        except AttributeError as error:
            sys.exit(f"error: {error}: let `forced` in {__file__} say what GPUs do now")
        yield


def check_forced(name: str, loop: Loop, ranks: int, launches: int) -> None:
    """End the process if what is forced had no effect on a loop of GPT-2."""
    if not isinstance(loop.model, ParallelModel):
        return
    modules = [each for part in loop.model.parts.values() for each in part.modules()]
    states = (each._get_fsdp_state() for each in modules if isinstance(each, FSDPModule))
    units = len(set(states))  # blocks of a unit share theirs
    if units != units_of(ranks):
        sys.exit(f"error: {name} has {units} units of FSDP, not {units_of(ranks)}: say so there")
    if not launches:
        sys.exit(f"error: the optimizer of {name} launches no kernel by Triton")
    assert len(loop.model.weights) == TENSORS["gpt2"], len(loop.model.weights)


def least(steps: dict[str, list[Step]]) -> dict[str, list[float]]:
    """Return the CPU milliseconds of each step, then of its parts: the least. They take turns."""
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()  # as trainers do
    for turn, name in itertools.product(range(TURNS), steps):
        warm_up = 1 if turn else 5  # the first steps compile
        for number in range(warm_up + STEPS):
            marks = [time.process_time()]
            for part in steps[name]:
                part()
                marks.append(time.process_time())
            if number >= warm_up:
                times[name].append([1e3 * (b - a) for a, b in itertools.pairwise(marks)])
    gc.enable()
    return {
        name: [min(map(sum, rounds)), *map(min, zip(*rounds))] for name, rounds in times.items()
    }


def optimizer_alone(rule: str, layout: Layout) -> Step:
    """Return the step of an optimizer of the 291 tensors of a Llama of 32 layers."""
    owner = ours(LLAMA, rule, 64, 1, 16, dtype="bfloat16", layout=layout).owner
    parameters = [each for group in owner.param_groups for each in group["params"]]
    assert len(parameters) == TENSORS["llama"], len(parameters)
    for each in parameters:
        each.grad = torch.randn_like(each)
    return owner.step


def random_windows(folder: Path) -> MixedWindows:
    """Return the windows of 1,024 targets of 4 million tokens."""
    texts = ("\x01" * 4095 for _ in range(1000))
    manifest = write_shards(DataConfig(), ByteTokenizer(), texts, folder)
    return MixedWindows([Windows(folder, manifest.splits["train"], manifest.dtype, 1024)])


def measure(ranks: int, names: list[str]) -> None:
    """Print the rows of one layout."""
    try:
        from tests.support import fake_driver
    except ImportError:
        sys.exit("error: Triton is not installed: pip install triton -c constraints.txt")
    driver = fake_driver.pretend()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # of one process for all loops
    layout = simulated_layout(ranks)
    loops = {
        name: plain(GPT2, 64, 1, 16, "bfloat16")
        if name == "plain"
        else ours(GPT2, name, 64, 1, 16, dtype="bfloat16", layout=layout)
        for name in names
    }
    found = least({name: [*loop[:3]] for name, loop in loops.items()})
    with tempfile.TemporaryDirectory() as folder:
        windows = random_windows(Path(folder) / "shards")
        sizes = {"global_batch_size": 16, "microbatch_size": 8, "rank": 0, "ranks": 1}
        with_data = {name: Loader(windows, seed=0, **sizes) for name in loops}
        fed = least({name: [with_data[name].step, *loop[:3]] for name, loop in loops.items()})
        close_all()
    launches = {}
    for name, loop in loops.items():
        driver.launches.clear()
        loop.step()
        launches[name] = len(driver.launches)
        check_forced(name, loop, ranks, launches[name])
    alone = {name: [optimizer_alone(name, layout)] for name in names if name != "plain"}
    of_many = {name: times[0] for name, times in least(alone).items()}
    base = found.get("plain", [float("nan")])[0]
    for name, (whole, *parts) in found.items():
        numbers = [f"{whole:.1f} | {whole / base:.2f}", *(f"{each:.1f}" for each in parts[:2])]
        numbers += [f"{parts[1] / base:.2f}"]
        many = of_many.get(name)
        numbers += [f"{many:.1f} | {many / base:.2f}"] if many is not None else ["– | –"]
        numbers += [f"{fed[name][0]:.1f}", str(launches[name])]
        rank = "1 rank" if ranks == 1 else f"FSDP, {ranks} ranks"
        print(f"| {rank} | {name} | {' | '.join(numbers)} |", flush=True)


def main() -> None:
    """Measure each layout in a process of its own: it has one process group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--only", nargs="+", default=["plain", *RULES])
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        with as_on_gpu():
            measure(options.ranks[0], options.only)
        return
    print(
        "| layout | loop | step, ms | ratio | passes | optimizer | ratio | of 291 tensors | ratio "
        "| step with data, ms | launches by Triton |\n" + "|---" * 11 + "|",
        flush=True,
    )
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    for ranks in options.ranks:
        command = [sys.executable, "-m", "tests.measurements.host_step", "--alone", "--ranks"]
        subprocess.run(
            [*command, str(ranks), "--only", *options.only],
            env=os.environ | environment | {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"},
            check=True,
        )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
