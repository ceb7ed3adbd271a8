"""Tasks: questions to a model, in the words of EleutherAI's harness.

Source: the definitions of the tasks in lm-evaluation-harness 0.4 (Gao et al. 2024,
10.5281/zenodo.12608602), so that results can be compared with published ones.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]
BRACKETS = re.compile(r"\[.*?\]")


@dataclass(frozen=True)
class Question:
    """A context and its continuation: one of several answers, or the last word of a text.

    Raises `ValueError` if the right answer is not among them, or a part is not text.
    """

    contexts: tuple[str, ...]
    """The text before each answer. It is the same for all, except in Winogrande."""
    answers: tuple[str, ...]
    """They follow after a blank."""
    right: int
    """The number of the right answer."""

    def __post_init__(self) -> None:
        count = len(self.answers)
        if not (isinstance(self.right, int) and 0 <= self.right < count):
            raise ValueError(f"its answer is number {self.right!r}, and it has {count}")
        if not all(isinstance(text, str) for text in self.contexts):
            raise ValueError("its context is no text")
        if not all(isinstance(text, str) and text for text in self.answers):
            raise ValueError("an answer is no text, or empty")

    @property
    def solved(self) -> str:
        """The question with its right answer, as an example for others."""
        return f"{self.contexts[self.right]} {self.answers[self.right]}"


def with_examples(
    question: Question, examples: Sequence[Question], shots: int, seed: int
) -> Question:
    """Return a question after `shots` solved examples, none of which is the question.

    The examples are drawn by `seed` from more than `shots` that are all different.
    """
    if not shots:
        return question
    drawn = random.Random(seed).sample(examples, shots + 1)
    others = [example for example in drawn if example != question][:shots]
    before = "".join(f"{example.solved}\n\n" for example in others)
    return replace(question, contexts=tuple(before + context for context in question.contexts))


@dataclass(frozen=True)
class Task:
    """A benchmark: where its rows lie on the hub, and how a row becomes a question."""

    ask: Callable[[Row], Question]
    dataset: str
    config: str | None
    split: str
    examples: str | None
    """The split that examples for few-shot prompts are taken from. None: `split` itself."""


def choice(context: str, answers: Sequence[str], right: int) -> Question:
    """Return a question whose answers all follow the same context."""
    return Question((context,) * len(answers), tuple(answers), right)


def hellaswag(row: Row) -> Question:
    """Zellers et al. 2019, arXiv 1905.07830."""
    if "ctx_b" in row:
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    else:
        context = row["ctx"]
    texts = [  # without the marks of WikiHow
        BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")
        for text in (f"{row['activity_label']}: {context}", *row["endings"])
    ]
    return choice(texts[0], texts[1:], int(row["label"]))


def arc(row: Row) -> Question:
    """Clark et al. 2018, arXiv 1803.05457."""
    choices = row["choices"]
    right = choices["label"].index(row["answerKey"])
    return choice(f"Question: {row['question']}\nAnswer:", choices["text"], right)


def piqa(row: Row) -> Question:
    """Bisk et al. 2020, arXiv 1911.11641."""
    context = f"Question: {row['goal']}\nAnswer:"
    return choice(context, [row["sol1"], row["sol2"]], int(row["label"]))


def winogrande(row: Row) -> Question:
    """Sakaguchi et al. 2020, arXiv 1907.10641. The end of the sentence is the answer."""
    before, _, after = row["sentence"].partition("_")
    contexts = tuple(before + row[option] for option in ("option1", "option2"))
    return Question(contexts, (after.strip(),) * 2, int(row["answer"]) - 1)


def openbookqa(row: Row) -> Question:
    """Mihaylov et al. 2018, arXiv 1809.02789."""
    choices = row["choices"]
    right = choices["label"].index(row["answerKey"].strip())
    return choice(row["question_stem"], choices["text"], right)


def sciq(row: Row) -> Question:
    """Welbl et al. 2017, arXiv 1707.06209."""
    names = ("distractor1", "distractor2", "distractor3", "correct_answer")
    context = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return choice(context, [row[name] for name in names], 3)


def last_word(row: Row) -> Question:
    """LAMBADA (Paperno et al. 2016, arXiv 1606.06031), and any text: its last word."""
    context, _, word = row["text"].rstrip().rpartition(" ")
    return choice(context, [word], 0)


def multiple_choice(row: Row) -> Question:
    """Rows of a file of the user's own: `context`, `choices` and the number `answer`."""
    return choice(row["context"], row["choices"], row["answer"])


TASKS = {
    "hellaswag": Task(hellaswag, "Rowan/hellaswag", None, "validation", "train"),
    "arc_easy": Task(arc, "allenai/ai2_arc", "ARC-Easy", "test", "train"),
    "arc_challenge": Task(arc, "allenai/ai2_arc", "ARC-Challenge", "test", "train"),
    "piqa": Task(piqa, "baber/piqa", None, "validation", "train"),
    "winogrande": Task(winogrande, "allenai/winogrande", "winogrande_xl", "validation", "train"),
    "openbookqa": Task(openbookqa, "allenai/openbookqa", "main", "test", "train"),
    "sciq": Task(sciq, "allenai/sciq", None, "test", "train"),
    "lambada": Task(last_word, "EleutherAI/lambada_openai", "default", "test", None),
}
