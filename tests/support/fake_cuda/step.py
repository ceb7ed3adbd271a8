"""`python -m tests.support.fake_cuda.step < CASES.json`: a training step of each, in one process.

Each case is a fork, which has process groups of its own. It prints a line of JSON.
"""

import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode  # private, torch 2.11 to 2.15
from torch.distributed.pipelining import _utils
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchmars
from tests.support.fake_cuda import device as fake_device
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.models import build_meta_model
from torchmars.optim import mars
from torchmars.optim.compiling import has_triton
from torchmars.optim.matrices import agreement
from torchmars.parallel.groups import make_groups, make_meshes
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.training.optimizer import MovingAverage, build_optimizer

PACKAGE = f"{Path(torchmars.__file__).parent}/"
DEVICE = torch.device("cuda", 0)
# Operations that start nothing on a GPU: views, and those of shapes and of memory.
FREE = {
    *("_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like"),
    *("empty_strided", "expand", "lift_fresh", "movedim", "narrow", "new_empty", "permute"),
    *("new_empty_strided", "record_stream", "select", "set_", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_reshape_alias"),
    *("wait_tensor", "_wrap_tensor_autograd", "is_same_size", "resize_", "device", "unflatten"),
    *("_pin_memory", "is_pinned"),
}


@dataclass
class Found:
    """What a part of a step does."""

    launches: int = 0
    """Operations on the GPU. Those of compiled kernels are not in it."""
    kernels: int = 0
    """Tensors that compiled kernels work on, one after the other."""
    launched: dict[str, int] = field(default_factory=dict)
    """Kernels by Triton, by name: they are among the launches."""
    to_device: list[str] = field(default_factory=list)
    """Operations that copy from the host, with their callers."""
    to_host: list[str] = field(default_factory=list)
    """And to it."""
    waits: list[str] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    """The operations that there are most of."""


class Watch(TorchDispatchMode):
    """Fills a `Found` while it is entered."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found, self.counts, self.paused = found, Counter[str](), False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if self.paused:
            return result
        before, after = tensors_in((args, kwargs)), tensors_in(result)
        if name == "copy_":  # its target is an argument, too
            before, after = tensors_in(args[1]), tensors_in(args[0])
        origins, places = kinds(before), kinds(after)
        # Of a list of numbers, torch makes a tensor on the host first.
        if places == {"cuda"} and (origins == {"cpu"} or name == "lift_fresh"):
            self.found.to_device.append(f"{name} in {caller()}")
        if "cpu" in places and "cuda" in origins:
            self.found.to_host.append(f"{name} in {caller()}")
        # A kernel takes a 0-d tensor of the host as an argument, and no other one.
        if "cuda" in origins and "cpu" in kinds(each for each in before if each.ndim):
            self.found.to_device.append(f"{name} of tensors of two devices in {caller()}")
        if name not in FREE and "cuda" in origins | places:
            self.counts[name] += 1
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.found.launches = self.counts.total()
        self.found.most = dict(self.counts.most_common(12))
        self.found.waits += fake_device.WAITS
        fake_device.WAITS.clear()


class OnFakeGpu(TorchFunctionMode):
    """Lets `fake` make what is made on the GPU, and the real torch what is made elsewhere."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if not any(
            isinstance(each, torch.device) and each.type == "cuda"
            for each in (*args, *kwargs.values())
        ):
            return function(*args, **kwargs)
        with self.fake:
            made = [self.fake.from_tensor(each) if is_real(each) else each for each in args]
            return function(*made, **kwargs)


def is_real(value: Any) -> bool:
    """Return whether a value is a tensor with values."""
    return type(value) is Tensor


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in `values`, at any depth."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def kinds(tensors: Iterable[Tensor]) -> set[str]:
    """Return the kinds of the tensors' devices."""
    return {each.device.type for each in tensors}


def caller() -> str:
    """Return the innermost line of torchmars that runs, or of whatever runs."""
    frames = [each for each in traceback.extract_stack() if each.filename.startswith(PACKAGE)]
    *_, last = frames or traceback.extract_stack()
    return f"{last.filename.removeprefix(PACKAGE)}:{last.lineno} {last.line}"


@contextlib.contextmanager
def compiled_kernels(watches: list[Watch]) -> Iterator[None]:
    """Let torch.compile return what counts one kernel for each tensor, and launches nothing."""

    def compile(kernel: Any, **options: Any) -> Any:
        def call(tensors: Any, *args: Any) -> Any:
            watch = watches[-1]
            watch.found.kernels += len(tensors)
            watch.paused = True
            try:
                return kernel(tensors, *args)
            finally:
                watch.paused = False

        return call

    with mock.patch.object(torch, "compile", compile):
        yield


def address(tensor: Tensor) -> int:
    """Return an address for a fake tensor: each memory has one of its own, as aligned as CUDA's."""
    return 512 * tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


@contextlib.contextmanager
def launched_kernels(watches: list[Watch], kernels: bool) -> Iterator[None]:
    """Let launches of Triton's kernels count, and start nothing; or let there be no `kernels`."""

    def launch(kernel: Any, programs: int, *arguments: Any, **form: Any) -> None:
        if programs and watches:  # an optimizer tries a kernel when it is made
            watches[-1].counts[kernel.__name__] += 1
            launched = watches[-1].found.launched
            launched[kernel.__name__] = launched.get(kernel.__name__, 0) + 1

    with contextlib.ExitStack() as patches:
        if kernels:
            patches.enter_context(mock.patch("torchmars.optim.gpu.launches.launch", launch))
        patches.enter_context(mock.patch.object(mars, "has_launches", lambda _: kernels))
        patches.enter_context(mock.patch.object(FakeTensor, "data_ptr", address))
        patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda each: each))
        yield


@contextlib.contextmanager
def without_vote() -> Iterator[None]:
    """Leave out that stages of a pipeline agree, before the first step, on what they send.

    torch 2.13 does. They wait for each other's answers, once.
    """

    def settle(schedule: Any, stages: Any, *args: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    if not hasattr(_PipelineSchedule, "_warmup_p2p"):
        yield
        return
    with mock.patch.object(_PipelineSchedule, "_warmup_p2p", settle):
        yield


def make_step(
    tables: dict[str, dict[str, Any]],
    world: int,
    vocab_size: int,
    compiled: bool = True,
    kernels: bool = True,
) -> dict[str, Any]:
    """Make some training steps of rank 0 of `world`; return what the last one does.

    `tables` are those of a config. The optimizer has `kernels` by Triton, where it is installed; or
    whether its passes are compiled: `compiled`. Returns how many `tensors` and `microbatches` there
    are, a `Found` for each part, "passes" and "optimizer", and the gradients' `addresses`.
    """
    config = config_from_tables(tables, "of a test")
    model, fake = fake_model(config, world, vocab_size)
    watches: list[Watch] = []
    kernels = kernels and has_triton()
    stubs = contextlib.ExitStack()
    stubs.enter_context(launched_kernels(watches, kernels))
    with OnFakeGpu(fake), mock.patch.object(agreement, "_least", lambda values, *_: values):
        optimizer = build_optimizer(config, model.whole, model.weights, model.layout)
        optimizer.compile = compiled
        average = None
        if config.training.ema_decay:
            average = MovingAverage(model.weights, config.training.ema_decay)
    size, microbatches = config.training.microbatches(
        model.layout.data.size, config.parallelism.stages
    )
    windows = torch.zeros(size, config.training.seq_len + 1, dtype=torch.int64)
    with fake, stubs, compiled_kernels(watches), without_vote():
        batch = [fake.from_tensor(windows) for _ in range(microbatches)]
        # The first one makes state, and buffers; in exact mode the second one its other places.
        for _ in range(3 if optimizer.exact else 2):
            passes, updates = Watch(Found()), Watch(Found())
            watches += [passes, updates]
            if optimizer.exact:
                with passes:
                    model.backward(batch)
                with updates:
                    optimizer.look_ahead()
                optimizer.zero_grad()
            with passes:
                model.backward(batch)
            with updates:
                optimizer.step()
                model.follow_weights()
                if average is not None:
                    average.update()
            optimizer.zero_grad()
    return {
        "tensors": len(model.weights),
        "microbatches": microbatches,
        "passes": asdict(passes.found),
        "optimizer": asdict(updates.found),
        "addresses": optimizer.launcher._sent[0] if optimizer.launcher else [],
    }


def fake_model(
    config: ResolvedConfig, world: int, vocab_size: int
) -> tuple[ParallelModel, FakeTensorMode]:
    """Return the model of rank 0 of `world` on the fake GPU, and the mode of its weights."""
    degrees = config.parallelism.degrees(world)
    dist.init_process_group("fake", rank=0, world_size=world)
    mesh, weight_mesh, expert_mesh = make_meshes("cuda", degrees)
    assert dist.group.WORLD is not None
    groups = make_groups(mesh, expert_mesh)
    layout = Layout(DEVICE, weight_mesh, expert_mesh, groups, dist.group.WORLD)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with OnFakeGpu(fake):
        model = ParallelModel(
            build_meta_model(config.model, vocab_size, config.training.seq_len),
            config.parallelism,
            config.training,
            config.activation_checkpoint,
            layout,
            DEVICE,
            find_starts=some_starts if config.data.separate_documents else None,
        )
    return model, fake


def some_starts(tokens: Tensor) -> Tensor:
    """Return where documents begin: sixteen in each sequence."""
    return torch.zeros(len(tokens), 16, dtype=torch.int32)


def main() -> None:
    """Make the steps, each in a fork."""
    fake_device.pretend()
    for case in json.load(sys.stdin):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            line = make_step(**case)
        except BaseException:
            line = {"error": traceback.format_exc()}
        print(json.dumps(line), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
