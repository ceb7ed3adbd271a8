"""How fast a config trains: a short run of its own on random tokens, read from its metrics."""

import hashlib
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np

from torchmars.cluster.environment import read_environment
from torchmars.cluster.process import start_launcher, stopping
from torchmars.config import ResolvedConfig, ResolvedData
from torchmars.config.load import config_text
from torchmars.core.console import say
from torchmars.core.errors import EXIT_MISTAKE, EXIT_STOPPED, Ended, UserError, say_error
from torchmars.data.manifest import Shard, Split, numpy_dtype, write_manifest
from torchmars.data.tokenizer import load_tokenizer, smallest_dtype
from torchmars.records.lines import METRICS_FILE, Row, measurements, read_lines

LAST_LINES = 20  # of what a run printed that failed
DOCUMENT = 1000  # random tokens of a document, with the one that ends it
MOST_TOKENS = 20_000_000  # of a split; a run that needs more reads them again


def ranks_of(config: ResolvedConfig, devices: int) -> int:
    """Return how many ranks a config is run on.

    NGPU, or as many as its degrees make: where dp_shard is the rest, as many as there are `devices`
    for. Raises `UserError` for a variable of run_train.sh that is wrong.
    """
    given = read_environment(os.environ).NGPU
    if given is not None:
        return given
    degrees = config.parallelism
    product = degrees.dp_replicate * degrees.cp * degrees.tp * degrees.pp
    if degrees.dp_shard > 0:
        return product * degrees.dp_shard
    return product * max(1, devices // product)


def measure(config: ResolvedConfig, steps: int, ranks: int) -> Row:
    """Train `steps` steps and then as many again; return the metrics of the second half.

    Speed and the time of a step are means over its steps. The run reads random tokens, and writes
    neither checkpoints nor for trackers. Raises `UserError` for an error that ends the run, and
    `Ended` with the code of a crash.
    """
    with tempfile.TemporaryDirectory(prefix="torchmars-bench-") as scratch:
        folder, file = Path(scratch), Path(scratch) / "run.toml"
        config = short_run(config, steps, folder)
        file.write_text(config_text(config), encoding="utf-8")
        with (folder / "output").open("w+") as output:
            code = train(file, ranks, output.fileno())
            output.seek(0)
            if code:
                fail(code, output.read().splitlines())
        rows = read_lines(config.run.path / METRICS_FILE, measurements)
        return next(row for row in reversed(rows) if "train/loss" in row)


def short_run(config: ResolvedConfig, steps: int, folder: Path) -> ResolvedConfig:
    """Return the config of the same training in `folder`, without all that is no training."""
    tokens = 2 * steps * config.training.tokens_per_step + 1
    return replace(
        config,
        run=replace(config.run, name="bench", folder=str(folder)),
        data=write_random_shards(config.data, tokens, folder / "shards"),
        training=replace(config.training, steps=2 * steps, stop_after=None),
        schedule=replace(config.schedule, name="constant", decay_steps=None, power=1.0),
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
        metrics=replace(config.metrics, log_interval=steps, tensorboard=False, wandb=False),
    )


def write_random_shards(data: ResolvedData, tokens: int, folder: Path) -> ResolvedData:
    """Write shards of `tokens` random tokens to `folder`; return the section that reads them.

    They are whole documents, and at most `MOST_TOKENS`. The vocabulary is the one of
    `data.tokenizer`, each token as likely as another. Raises `UserError` if there is no such
    tokenizer.
    """
    tokenizer = load_tokenizer(data.tokenizer, data.begin_token)
    dtype = smallest_dtype(tokenizer.vocab_size)
    documents = -(-min(tokens, MOST_TOKENS) // DOCUMENT)
    drawn = np.random.default_rng(0).integers(tokenizer.vocab_size, size=(documents, DOCUMENT))
    drawn[:, : len(tokenizer.before)] = tokenizer.before
    drawn[:, -1] = tokenizer.end_of_text
    content = drawn.astype(numpy_dtype(dtype)).tobytes()
    digest, largest = hashlib.sha256(content).hexdigest(), int(drawn.max())
    folder.mkdir()
    splits = {}
    for name in ("train", "validation"):
        file = f"{name}-00000.bin"
        (folder / file).write_bytes(content)
        splits[name] = Split(drawn.size, documents, 0, largest, [Shard(file, drawn.size, digest)])
    random = replace(data, source="stdlib", files=[], mixture=[], path=str(folder), verify="size")
    write_manifest(folder, random, tokenizer, dtype, splits)
    return random


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


def fail(code: int, printed: list[str]) -> None:
    """Raise the error of a run that has `printed` lines and ended with a `code` other than 0."""
    if code == EXIT_STOPPED:
        say_error("stopped by a signal before all was measured")
        raise Ended(code)
    errors = [line for line in printed if line.startswith("error: ")]
    if code == EXIT_MISTAKE and errors:
        raise UserError(errors[-1].removeprefix("error: "))
    say(*printed[-LAST_LINES:], error=True)
    raise Ended(code)
