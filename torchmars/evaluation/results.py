"""Accuracies of answers, with standard errors."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torchmars.core.tables import table
from torchmars.evaluation.scoring import Report, Score, Scorer
from torchmars.evaluation.tasks import Question


@dataclass(frozen=True)
class Result:
    """How a model answered the questions of a task."""

    task: str
    questions: int
    accuracy: float
    """Share of the questions whose right answer is the likeliest; of last words, share of those
    whose tokens all are the likeliest."""
    accuracy_stderr: float
    """Its standard error."""
    accuracy_norm: float | None
    """Share of the questions whose right answer has the largest log-likelihood for each of its
    characters. None for last words."""
    accuracy_norm_stderr: float | None
    chance: float
    """Accuracy of guessing; 0 for last words."""
    perplexity: float | None
    """Of last words: exp of the mean negative log-likelihood of a word."""

    def measures(self) -> dict[str, float]:
        """Return the measurements, by name."""
        values = {name: value for name, value in asdict(self).items() if name != "task"}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """Return the result in a few words."""
        text = f"{self.task} accuracy {with_error(self.accuracy, self.accuracy_stderr)}"
        if self.perplexity is not None:
            return f"{text}, perplexity {self.perplexity:.2f}"
        norm = with_error(self.accuracy_norm, self.accuracy_norm_stderr)
        return f"{text}, by characters {norm}, chance {self.chance:.4f}"


class Evaluation:
    """Asks a model the questions of tasks, by name. Every rank makes the same calls."""

    def __init__(self, scorer: Scorer, tasks: dict[str, list[Question]]) -> None:
        self.scorer, self.tasks = scorer, tasks

    @property
    def answers(self) -> int:
        """How many answers are scored."""
        return sum(len(question.answers) for task in self.tasks.values() for question in task)

    def results(self, report: Report = lambda count: None) -> list[Result]:
        """Return the result of each task. `report` is told how many answers were scored."""
        return [
            result(task, questions, self.scores(questions, report))
            for task, questions in self.tasks.items()
        ]

    def scores(self, questions: Sequence[Question], report: Report) -> list[list[Score]]:
        """Return the score of each answer to each question."""
        pairs = [
            (context, f" {answer}")
            for question in questions
            for context, answer in zip(question.contexts, question.answers)
        ]
        found = iter(self.scorer.score(pairs, report))
        return [[next(found) for _ in question.answers] for question in questions]


def result(task: str, questions: Sequence[Question], scores: Sequence[Sequence[Score]]) -> Result:
    """Return the accuracies of answers with these scores."""
    if all(len(question.answers) == 1 for question in questions):
        hits = [answer.likeliest for (answer,) in scores]
        mean = sum(answer.log_likelihood for (answer,) in scores) / len(scores)
        perplexity = math.exp(min(-mean, 700.0))
        return Result(task, len(hits), *accuracy(hits), None, None, 0.0, perplexity)
    plain, norm = [], []
    for question, answers in zip(questions, scores):
        sums = [answer.log_likelihood for answer in answers]
        means = [one / len(text) for one, text in zip(sums, question.answers)]
        plain.append(place_of_largest(sums) == question.right)
        norm.append(place_of_largest(means) == question.right)
    chance = sum(1 / len(question.answers) for question in questions) / len(questions)
    return Result(task, len(plain), *accuracy(plain), *accuracy(norm), chance, None)


def place_of_largest(values: Sequence[float]) -> int | None:
    """Return where the largest value is, the first of equal ones; None if one is no number."""
    if any(math.isnan(value) for value in values):
        return None
    return values.index(max(values))


def accuracy(hits: Sequence[bool]) -> tuple[float, float]:
    """Return the share of `hits`, and its standard error from the variance of the sample."""
    share = sum(hits) / len(hits)
    if len(hits) == 1:
        return share, math.nan
    return share, math.sqrt(share * (1 - share) / (len(hits) - 1))


def with_error(value: float | None, stderr: float | None) -> str:
    """Return a value and its standard error as text; "-" if there is none."""
    return "-" if value is None else f"{value:.4f} ± {stderr:.4f}"


def results_table(results: Sequence[Result]) -> list[str]:
    """Return the lines of a table of results."""
    heads = ("task", "questions", "accuracy", "by characters", "chance", "perplexity")
    rows = [
        (
            each.task,
            f"{each.questions:,}",
            with_error(each.accuracy, each.accuracy_stderr),
            with_error(each.accuracy_norm, each.accuracy_norm_stderr),
            f"{each.chance:.4f}",
            "-" if each.perplexity is None else f"{each.perplexity:.2f}",
        )
        for each in results
    ]
    return table([heads, *rows])
