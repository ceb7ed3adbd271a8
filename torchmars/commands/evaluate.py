"""Measure how good a model is: its accuracy on tasks, and its loss on texts."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchmars.config import ParallelismConfig
from torchmars.config.fields import Count, Positive
from torchmars.config.plugins import PluginOptions
from torchmars.core.bounds import Pattern
from torchmars.core.errors import (
    LostRank,
    UserError,
    end_at_once,
    exit_on_user_error,
    report_failure,
)
from torchmars.core.help import Positional
from torchmars.core.options import check_results_file, parse, words, write_results
from torchmars.data.progress_bar import ProgressBar
from torchmars.evaluation.rows import read_tasks

if TYPE_CHECKING:
    from torchmars.evaluation.results import Result
    from torchmars.evaluation.scoring import Tokens
    from torchmars.evaluation.texts import TextResult
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
    """Tasks, with commas between them: hellaswag, arc_easy, arc_challenge, piqa, winogrande,
    openbookqa, sciq and lambada come from the hub; TASK=FILE.jsonl has the rows of one of these;
    FILE.jsonl has rows of your own."""
    text: Annotated[str, Pattern()] | None = None
    """Measure the loss on the text files that a path, a folder or a glob names."""
    shards: Path | None = None
    """Measure the loss on the validation split in a folder of shards."""
    step: Count | None = None
    """Of a run, take the checkpoint of this step."""
    shots: Count = 0
    """Solved examples before each question."""
    limit: Positive | None = None
    """Take only the first so many questions of each task, and windows of each text."""
    batch_size: Positive = 16
    """Texts that a rank scores at once. Lower it where memory is short."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which the model computes."""
    seed: Count = 0
    """Draws the examples."""
    json: Path | None = None
    """Write the results to this file too."""


def main() -> None:
    """Print the results, and write them."""
    first = os.environ.get("RANK", "0") == "0"
    with exit_on_user_error(quiet=not first):
        options = parse(Evaluate, sys.argv[1:], "torchmars evaluate")
        if options.tasks is None and not (options.text or options.shards):
            raise UserError("name what to measure: --tasks, --text or --shards")
        tasks = [] if options.tasks is None else words(options.tasks, "--tasks")
        check_results_file(options.json)
    from torchmars.cluster import connection, process

    try:
        with exit_on_user_error(quiet=not first):
            process.check_variables()
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
    from torchmars.evaluation import results, scoring, texts

    tasks = layout.on_first(lambda: read_tasks(names, options.shots, options.limit, options.seed))
    how = options.dtype, options.batch_size, options.step
    scorer = scoring.load_scorer(options.model, layout, *how)
    opened: dict[str, Sequence[Tokens]] = {}
    layout.on_all(lambda: opened.update(texts.open_texts(options.text, options.shards, scorer)))
    answered: list[Result] = []
    if tasks:
        evaluation = results.Evaluation(scorer, tasks)
        with ProgressBar("tasks", evaluation.answers, 0, "answer", layout.first) as bar:
            answered = evaluation.results(bar.add)
        layout.say(*results.results_table(answered))
    measured: list[TextResult] = []
    for name, windows in opened.items():
        count = min(len(windows), options.limit or len(windows))
        with ProgressBar(name, count, 0, "window", layout.first) as bar:
            measured.append(texts.measure_text(scorer, name, windows, count, bar.add))
    if measured:
        layout.say(*([""] if answered else []), *texts.texts_table(measured))
    if options.json is not None:
        file, found = options.json, all_measures(options, answered, measured)
        layout.on_first(lambda: write_results(file, found))


def all_measures(
    options: Evaluate, results: "list[Result]", texts: "list[TextResult]"
) -> dict[str, Any]:
    """Return results for a file of JSON. Numbers that are not finite are null."""
    return {
        "model": str(options.model),
        "shots": options.shots,
        "limit": options.limit,
        "seed": options.seed,
        "dtype": options.dtype,
        "tasks": {each.task: finite(each.measures()) for each in results},
        "texts": {each.text: finite(each.measures()) for each in texts},
    }


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Return measures as JSON can hold them."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
