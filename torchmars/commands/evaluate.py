"""Measure how good a model is: its accuracy on tasks, and its loss on texts."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Literal

from torchmars.config import ParallelismConfig
from torchmars.config.fields import Count, Positive
from torchmars.config.plugins import PluginOptions
from torchmars.core.check import Place
from torchmars.core.cli import Positional, parse, words, write_results
from torchmars.core.errors import (
    LostRank,
    UserError,
    end_at_once,
    exit_on_user_error,
    report_failure,
)
from torchmars.data.progress_bar import progress_bar

if TYPE_CHECKING:
    from torchmars.parallel.layout import Layout


@dataclass
class Evaluate(PluginOptions):
    """Measure what a model can do: its accuracy on tasks, and its loss on texts.

    Started by torchrun, the ranks share its weights and the work: torchrun --nproc-per-node 8 -m
    torchmars evaluate ...
    """

    model: Positional[PurePath]
    """A run, whose newest good checkpoint is taken, a checkpoint, or a folder that transformers
    reads. hf:NAME is a model of the hub."""
    tasks: str | None = None
    """Tasks of the package lm_eval, with commas between them: its names, such as hellaswag, or
    files *.yaml that describe tasks of your own. Such a file may name Python code, which runs."""
    text: Annotated[str, Place(stores=True, pattern=True)] | None = None
    """Measure the loss on the text files that a path, a folder or a glob names."""
    step: Count | None = None
    """Of a run, take the checkpoint of this step."""
    shots: Count | None = None
    """Solved examples before each question; by default as many as the task says, mostly 0."""
    limit: Positive | None = None
    """Take only the first so many questions of each task, and windows of the text."""
    batch_size: Positive = 16
    """Texts of the model's length that a rank scores at once, and of shorter ones more. Lower it
    where memory is short."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which the model computes."""
    json: Path | None = None
    """Write the results to this file too."""


def main() -> None:
    """Print the results, and write them."""
    first = os.environ.get("RANK", "0") == "0"
    with exit_on_user_error(quiet=not first):
        options, _ = parse(Evaluate, sys.argv[1:], "torchmars evaluate")
        if options.tasks is None and not options.text:
            raise UserError("name what to measure: --tasks or --text")
        tasks = [] if options.tasks is None else words(options.tasks, "--tasks")
    from torchmars.cluster import connection, process

    try:
        with exit_on_user_error(quiet=not first):
            process.check_devices()
            evaluate(options, tasks, connection.start(ParallelismConfig()))
    # Other ranks may wait for this one, and threads of other packages, such as datasets, may abort
    # the process where Python ends in its own way. So a failure is told, and the process ends.
    except SystemExit as ended:
        end_at_once(ended.code if isinstance(ended.code, int) else 1)
    except LostRank as error:  # a line instead of a traceback
        report_failure(error)
        end_at_once(1)
    finally:
        connection.stop()


def evaluate(options: Evaluate, names: list[str], layout: "Layout") -> None:
    """Measure, print and write the results. Called by every rank."""
    from torchmars.evaluation import scoring
    from torchmars.exchange.saved_model import load_sharded_model
    from torchmars.training.preparation import read_tasks

    tasks = layout.on_all(lambda: read_tasks(names, options.shots, options.limit))
    model = load_sharded_model(options.model, layout, options.dtype, options.step)
    scorer = scoring.Scorer(*model, options.batch_size)
    found: dict[str, dict[str, dict[str, float]]] = {"tasks": {}, "texts": {}}
    every = []
    if text := options.text:
        every = layout.on_all(lambda: scoring.windows_of_files(text, scorer))[: options.limit]
    if tasks is not None:
        with progress_bar("tasks", tasks.requests, "text", layout.first) as bar:
            found["tasks"] = tasks.ask(scorer, bar.update)
    if text:
        with progress_bar(text, len(every), "window", layout.first) as bar:
            found["texts"][text] = scoring.measure_text(scorer, every, bar.update)
    for each in found.values():
        layout.say(*(scoring.measures_in_words(*measured) for measured in each.items()))
    if (file := options.json) is not None:
        asked = {name: getattr(options, name) for name in ("shots", "limit", "dtype")}
        written = {"model": str(options.model), **asked, **{k: finite(v) for k, v in found.items()}}
        layout.on_first(lambda: write_results(file, written))


def finite(measured: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return measures as JSON can hold them: numbers that are not finite are null."""
    return {
        what: {name: value if math.isfinite(value) else None for name, value in values.items()}
        for what, values in measured.items()
    }
