"""Accuracies of answers, with standard errors."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torchmars.core.tables import table
from torchmars.evaluation.scoring import Score, Scorer
from torchmars.evaluation.tasks import Question


@dataclass(frozen=True)
class Result:
    """How a model answered the questions of a task."""

    task: str
    questions: int
    shots: int
    """Examples before each question."""
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


def evaluate(
    scorer: Scorer,
    task: str,
    questions: Sequence[Question],
    examples: Sequence[Question],
    shots: int,
    seed: int,
    report: Callable[[int], None] = lambda count: None,
) -> Result:
    """Ask a model the questions of a task, each after `shots` of the solved `examples`.

    `report` is told how many answers were scored.
    """
    prompts = [prompt(question, examples, shots, seed + n) for n, question in enumerate(questions)]
    pairs = [
        (before + context, answer)
        for before, question in zip(prompts, questions)
        for context, answer in zip(question.contexts, question.answers)
    ]
    found = iter(scorer.score(pairs, report))
    scores = [[next(found) for _ in question.answers] for question in questions]
    return result(task, questions, scores, shots)


def prompt(question: Question, examples: Sequence[Question], shots: int, seed: int) -> str:
    """Return `shots` solved examples, drawn by `seed`, none of which is the question."""
    if not shots:
        return ""
    others = random.Random(seed).sample(range(len(examples)), min(shots + 1, len(examples)))
    chosen = [examples[number] for number in others if examples[number] is not question][:shots]
    return "".join(f"{example.solved}\n\n" for example in chosen)


def result(
    task: str, questions: Sequence[Question], scores: Sequence[Sequence[Score]], shots: int
) -> Result:
    """Return the accuracies of answers with these scores."""
    if len(questions[0].answers) == 1:
        hits = [answers[0].likeliest for answers in scores]
        mean = sum(answers[0].log_likelihood for answers in scores) / len(scores)
        return Result(
            task, len(hits), shots, *accuracy(hits), None, None, 0.0, math.exp(min(-mean, 700.0))
        )
    plain, norm = [], []
    for question, answers in zip(questions, scores):
        sums = [answer.log_likelihood for answer in answers]
        # The blank before an answer does not count.
        means = [one / (len(text) - 1) for one, text in zip(sums, question.answers)]
        plain.append(sums.index(max(sums)) == question.right)
        norm.append(means.index(max(means)) == question.right)
    chance = sum(1 / len(question.answers) for question in questions) / len(questions)
    return Result(task, len(plain), shots, *accuracy(plain), *accuracy(norm), chance, None)


def accuracy(hits: Sequence[bool]) -> tuple[float, float]:
    """Return the share of `hits`, and its standard error from the variance of the sample."""
    share = sum(hits) / len(hits)
    if len(hits) == 1:
        return share, math.nan
    return share, math.sqrt(share * (1 - share) / (len(hits) - 1))


def results_table(results: Sequence[Result]) -> list[str]:
    """Return the lines of a table of results."""
    rows = [("task", "questions", "shots", "accuracy", "by characters", "chance", "perplexity")]
    for each in results:
        norm = (
            "-"
            if each.accuracy_norm is None
            else f"{each.accuracy_norm:.4f} ± {each.accuracy_norm_stderr:.4f}"
        )
        rows.append(
            (
                each.task,
                f"{each.questions:,}",
                str(each.shots),
                f"{each.accuracy:.4f} ± {each.accuracy_stderr:.4f}",
                norm,
                f"{each.chance:.4f}",
                "-" if each.perplexity is None else f"{each.perplexity:.2f}",
            )
        )
    return table(rows)


def results_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return results as JSON has them. What a task does not have is left out."""
    return [
        {name: value for name, value in asdict(each).items() if value is not None}
        for each in results
    ]
