"""A config's own training run in a folder that is deleted again, and how fast it was."""

import json
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from torchmars.benchmark.synthetic import write_random_shards
from torchmars.cluster import process
from torchmars.cluster.callers import start_launcher
from torchmars.cluster.environment import check_copies, read_environment
from torchmars.cluster.signals import stopping
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.console import say
from torchmars.core.errors import EXIT_MISTAKE, EXIT_STOPPED, Ended, UserError, say_error
from torchmars.data.manifest import has_manifest
from torchmars.records.lines import METRICS_FILE

LAST_LINES = 20  # of what a run printed that failed


@dataclass
class Measurement:
    """How fast one run was, after its first steps."""

    tokens_per_second: float
    mfu: float | None
    """Share of the GPUs' peak FLOPs; None if these are not known."""
    step_ms: float
    phases_ms: dict[str, float]
    """The time of a step by phases, see metrics/phases.py."""
    memory_gib: float
    """Peak memory of rank 0, since its start."""


def ranks_of(config: ResolvedConfig, devices: int | None = None) -> int:
    """Return how many ranks a config is run on.

    NGPU, or as many as its degrees make: where dp_shard is the rest, as many as there are `devices`
    for. These are by default the GPUs, 2 on a machine without. Raises `UserError` if NGPU is no
    number, and in one of several copies of this process, of which each would start ranks.
    """
    check_copies(os.environ)
    given = read_environment(os.environ).NGPU
    if given is not None:
        return given
    degrees = config.parallelism
    product = degrees.dp_replicate * degrees.cp * degrees.tp * degrees.pp
    if degrees.dp_shard > 0:
        return product * degrees.dp_shard
    devices = devices or process.local_gpus() or 2
    return product * max(1, devices // product)


def has_shards(config: ResolvedConfig) -> bool:
    """Return whether the shards of all of a config's corpora are there."""
    return all(has_manifest(Path(corpus.path)) for corpus in config.data.corpora())


def measure(config: ResolvedConfig, warmup: int, steps: int, ranks: int) -> Measurement:
    """Train `warmup` steps and then `steps` more, which count; return how fast they were.

    The run writes neither checkpoints nor for trackers. Where shards are missing it reads random
    tokens. Raises `UserError` for an error that ends the run, and `Ended` with the code of a crash.
    """
    with tempfile.TemporaryDirectory(prefix="torchmars-bench-") as scratch:
        folder = Path(scratch)
        config = short_run(config, warmup, steps, folder)
        if not has_shards(config):
            needed = (warmup + steps) * config.training.tokens_per_step
            data = write_random_shards(config.data, needed + 1, folder / "shards")
            config = replace(config, data=data)
        code, printed = train_in(folder, config, ranks)
        if code:
            fail(code, printed)
        return read_measurement(config.run.path / METRICS_FILE, warmup, config)


def short_run(config: ResolvedConfig, warmup: int, steps: int, folder: Path) -> ResolvedConfig:
    """Return the config of the same training in `folder`, without all that is no training."""
    return replace(
        config,
        run=replace(config.run, name="bench", folder=str(folder)),
        data=replace(config.data, verify="size"),
        training=replace(config.training, steps=warmup + steps),
        schedule=replace(config.schedule, name="constant", decay_steps=None),
        checkpoint=replace(
            config.checkpoint,
            folder=None,  # not that of the run itself
            interval=0,
            at_end=False,
            init_from=None,
            init_optimizer=False,
        ),
        validation=replace(config.validation, interval=0, sample_tokens=0),
        evaluation=replace(config.evaluation, interval=0, tasks=[]),
        metrics=replace(
            config.metrics, log_interval=math.gcd(warmup, steps), tensorboard=False, wandb=False
        ),
    )


def train_in(folder: Path, config: ResolvedConfig, ranks: int) -> tuple[int, str]:
    """Train a config on this machine; return its exit code, and all that it printed."""
    file = folder / "run.toml"
    file.write_text(config_text(config), encoding="utf-8")
    with (folder / "output").open("w+") as output:
        code = train(file, ranks, output.fileno())
        output.seek(0)
        return code, output.read()


def train(file: Path, ranks: int, output: int) -> int:
    """Run `torchmars train` on this machine, printing to `output`; return its exit code.

    It gets the signals that stop this process, which waits for it.
    """
    variables = os.environ | {"NGPU": str(ranks), "NNODES": "1"}
    process = start_launcher(["--prepared", str(file)], variables, stdout=output, stderr=output)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in stopping()}
    try:
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def fail(code: int, printed: str) -> None:
    """Raise the error of a run that ended with a `code` other than 0."""
    if code == EXIT_STOPPED:
        say_error("stopped by a signal before all was measured")
        raise Ended(code)
    lines = printed.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if code == EXIT_MISTAKE and errors:
        raise UserError(errors[-1].removeprefix("error: "))
    say(*lines[-LAST_LINES:], error=True)
    raise Ended(code)


def read_measurement(file: Path, warmup: int, config: ResolvedConfig) -> Measurement:
    """Return the metrics of a run's steps after the first `warmup`."""
    lines = list(lines_after(file, warmup))
    tokens_per_step = config.training.tokens_per_step
    # Each line is the mean of the steps since the one before.
    steps = [count for count, _ in lines]
    milliseconds = [1e3 * tokens_per_step / line["train/tokens_per_second"] for _, line in lines]
    step_ms = mean(milliseconds, steps)
    phases = {
        name.removeprefix("train/").removesuffix("_ms"): mean(
            [line[name] for _, line in lines], steps
        )
        for name in lines[0][1]
        if name.startswith("train/") and name.endswith("_ms")
    }
    rate = 1e3 * tokens_per_step / step_ms
    last = lines[-1][1]
    mfu = last.get("train/mfu")
    return Measurement(
        rate,
        mfu and mfu * rate / last["train/tokens_per_second"],
        step_ms,
        phases,
        max(line["train/memory_gib"] for _, line in lines),
    )


def lines_after(file: Path, step: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the lines of training steps after `step`, and how many steps each is the mean of."""
    before = 0
    for line in map(json.loads, file.read_text().splitlines()):
        if "train/loss" in line:
            if line["step"] > step:
                yield line["step"] - before, line
            before = line["step"]


def mean(values: list[float], weights: list[int]) -> float:
    """Return the mean of values that count as often as their weights say."""
    return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)
