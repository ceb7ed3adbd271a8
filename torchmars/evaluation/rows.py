"""The questions of tasks from their rows, on the hub or in files of JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path

from torchmars.core.errors import UserError, needs_package
from torchmars.core.files import read_text
from torchmars.core.places import local_place
from torchmars.core.typed import meant, parse_json
from torchmars.data.hub import distrust_hub, in_a_line
from torchmars.evaluation.tasks import (
    TASKS,
    Question,
    Row,
    Task,
    last_word,
    multiple_choice,
    with_examples,
)

SUFFIXES = (".jsonl", ".json")


def read_tasks(
    names: Sequence[str], shots: int = 0, limit: int | None = None, seed: int = 0
) -> dict[str, list[Question]]:
    """Return the first `limit` questions of each task, after `shots` examples, by its label.

    A name is one of TASKS, whose rows the hub has, "TASK=FILE" for a task whose rows a file
    has, or a file of JSON lines alone: `context`, `choices` and `answer`, or `text`. `seed` draws
    the examples: from the task's rows for training on the hub, or from the same file. Raises
    `UserError`.
    """
    tasks: dict[str, list[Question]] = {}
    for name in names:
        task = name.partition("=")[0]
        label = task if task in TASKS else Path(name).stem
        if label in tasks:
            raise UserError(f"two tasks are called {label}: rename the file of one")
        questions, examples = read_questions(name, shots)
        if shots >= len(examples) > 0:
            raise UserError(
                f"the task {label} has {len(examples)} rows to take examples from: lower shots"
            )
        tasks[label] = [
            with_examples(question, examples, shots, seed + number)
            for number, question in enumerate(questions[:limit])
        ]
    return tasks


def read_questions(name: str, shots: int) -> tuple[list[Question], list[Question]]:
    """Return the questions of a task, and for `shots` above 0 those that examples come from.

    The latter are all different. Raises `UserError`.
    """
    task_name, equals, file = name.partition("=")
    local_place(file if equals else name, "a file of a task")
    if task_name in TASKS:
        task = TASKS[task_name]
        source = file if equals else task.dataset
        rows = read_file(Path(file)) if equals else download(task, task.split)
    elif name.endswith(SUFFIXES):
        source, rows = name, read_file(Path(name))
        task = Task(last_word if "text" in rows[0] else multiple_choice, name, None, "", None)
    else:
        raise UserError(
            f"there is no task {task_name!r}: "
            + meant(task_name, [*TASKS], f"they are {', '.join(TASKS)}. ")
            + f"A file of questions is named *{SUFFIXES[0]}"
        )
    questions = examples = ask_all(task, rows, source)
    if shots and task.examples and not equals:
        examples = ask_all(task, download(task, task.examples), source)
    return questions, list(dict.fromkeys(examples)) if shots else []


def ask_all(task: Task, rows: list[Row], source: str) -> list[Question]:
    """Return the questions of rows. Raises `UserError` for a row that does not fit the task."""
    questions = []
    for number, row in enumerate(rows, start=1):
        try:
            questions.append(task.ask(row))
        except KeyError as error:
            raise UserError(f"row {number} of the task {source} lacks {error}") from None
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(
                f"row {number} of the task {source} is no question of its kind: {error}"
            ) from None
    return questions


def read_file(file: Path) -> list[Row]:
    """Return the rows of a file of JSON lines. Raises `UserError`."""
    try:
        # Not splitlines: a text may have other characters that end a line.
        lines = read_text(file).split("\n")
    except OSError as error:
        raise UserError(f"cannot read the task {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the task {file} is no text in UTF-8") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [parse_json(line)] if line.strip() else []
            json.dumps(rows[-1:], ensure_ascii=False).encode()  # no half of a surrogate pair
        except ValueError as error:
            raise UserError(
                f"line {number} of the task {file} is no JSON object: {error}"
            ) from None
    if not rows:
        raise UserError(f"the task {file} has no rows")
    return rows


def download(task: Task, split: str) -> list[Row]:
    """Return the rows of a task's split on the hub. Raises `UserError`."""
    with needs_package("datasets", "a task of the hub"):
        import datasets
    distrust_hub()
    try:
        return list(datasets.load_dataset(task.dataset, task.config, split=split))
    except UserError:
        raise
    except Exception as error:  # whatever the network and the hub make of it
        raise UserError(
            f"cannot load the task {task.dataset} from the hub ({in_a_line(error)}): name a file "
            "that has its rows, TASK=FILE.jsonl"
        ) from None
