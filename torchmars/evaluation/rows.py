"""The rows of tasks: from the hub, or from files of JSON lines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError
from torchmars.core.files import read_text
from torchmars.core.typed import nearest
from torchmars.evaluation.tasks import TASKS, Question, Task, last_word, multiple_choice

Row = Mapping[str, Any]


def read_questions(name: str) -> tuple[list[Question], list[Question]]:
    """Return the questions of a task, and those that examples are taken from.

    `name` is that of one of TASKS, which the hub has, "TASK=FILE" for a task whose rows a file has,
    or a file of JSON lines alone: `context`, `choices` and `answer`, or `text`. The two are the
    same list where a task has no examples of its own. Raises `UserError`.
    """
    task_name, equals, file = name.partition("=")
    if task_name in TASKS:
        task = TASKS[task_name]
        if equals:
            questions = ask_all(task, read_file(Path(file)), file)
            return questions, questions
        questions = ask_all(task, download(task, task.split), task.dataset)
        if task.examples is None:
            return questions, questions
        return questions, ask_all(task, download(task, task.examples), task.dataset)
    if not name.endswith((".jsonl", ".json")):
        raise UserError(
            f"--tasks: there is no task called {task_name!r}: did you mean "
            f"{nearest(task_name, list(TASKS))}? A file of your own must be named *.jsonl"
        )
    rows = read_file(Path(name))
    ask = last_word if "text" in rows[0] else multiple_choice
    questions = ask_all(Task(ask, name, None, "", None), rows, name)
    return questions, questions


def ask_all(task: Task, rows: list[Row], source: str) -> list[Question]:
    """Return the questions of rows. Raises `UserError` for a row that is none of the task's."""
    questions = []
    for number, row in enumerate(rows, start=1):
        try:
            question = task.ask(row)
            if not 0 <= question.right < len(question.answers):
                raise ValueError(f"its answer is number {question.right}")
            if not all(isinstance(text, str) and text for text in question.answers):
                raise ValueError("an answer is no text")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"is none: {error}"
            raise UserError(f"--tasks: row {number} of {source} {what}") from None
        questions.append(question)
    return questions


def read_file(file: Path) -> list[Row]:
    """Return the rows of a file of JSON lines. Raises `UserError`."""
    rows: list[Row] = []
    try:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise UserError(f"--tasks: line {number} of {file} is no JSON object")
            rows.append(row)
    except OSError as error:
        raise UserError(f"--tasks: cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--tasks: line {len(rows) + 1} of {file} is no JSON in UTF-8: {error}"
        ) from None
    if not rows:
        raise UserError(f"--tasks: {file} has no rows")
    return rows


def download(task: Task, split: str) -> list[Row]:
    """Return the rows of a task's split on the hub. Raises `UserError`."""
    try:
        import datasets
    except ImportError:
        raise UserError("tasks of the hub need a package: pip install 'torchmars[data]'") from None
    try:
        return list(datasets.load_dataset(task.dataset, task.config, split=split))
    except Exception as error:  # whatever the network and the hub make of it
        raise UserError(
            f"cannot load {task.dataset} from the hub ({type(error).__name__}: {error}): name a "
            "file that has its rows, TASK=FILE.jsonl"
        ) from None
