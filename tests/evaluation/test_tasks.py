"""Questions from rows, against prompts that were written by hand."""

import json
import math
import random

import pytest

from torchmars.core.errors import UserError
from torchmars.evaluation.results import Evaluation, accuracy, result
from torchmars.evaluation.rows import read_tasks
from torchmars.evaluation.scoring import Score
from torchmars.evaluation.tasks import TASKS, Question, choice, multiple_choice, with_examples

ARC = {
    "question": "What falls?",
    "choices": {"text": ["rain", "sky"], "label": ["1", "2"]},
    "answerKey": "2",
}
HELLASWAG = {
    "activity_label": "Cleaning [step] Windows",
    "ctx_a": "A man  waits.",
    "ctx_b": "he THEN",
    "endings": ["stands [title] jumps.", "sits [substeps]. down"],
    "label": "1",
}
# A row of each kind, what stands before each answer, the answers, and the right one.
ROWS = [
    (
        "hellaswag",
        HELLASWAG,
        ["Cleaning Windows: A man waits. He then"] * 2,
        ["stands. jumps.", "sits . down"],
        1,
    ),
    (
        "hellaswag",
        {"activity_label": "Roof", "ctx": "A man. he", "endings": ["is.", "was."], "label": 0},
        ["Roof: A man. he"] * 2,
        ["is.", "was."],
        0,
    ),
    ("arc_easy", ARC, ["Question: What falls?\nAnswer:"] * 2, ["rain", "sky"], 1),
    ("arc_challenge", ARC, ["Question: What falls?\nAnswer:"] * 2, ["rain", "sky"], 1),
    (
        "piqa",
        {"goal": "Boil eggs.", "sol1": "Use water.", "sol2": "Use ice.", "label": 0},
        ["Question: Boil eggs.\nAnswer:"] * 2,
        ["Use water.", "Use ice."],
        0,
    ),
    (
        "winogrande",
        {
            "sentence": "Ann met Eve and _ was glad.",
            "option1": "Ann",
            "option2": "Eve",
            "answer": "2",
        },
        ["Ann met Eve and Ann", "Ann met Eve and Eve"],
        ["was glad."] * 2,
        1,
    ),
    (
        "openbookqa",
        {
            "question_stem": "The sun is",
            "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
            "answerKey": "A ",
        },
        ["The sun is"] * 2,
        ["hot", "cold"],
        0,
    ),
    (
        "sciq",
        {
            "support": " Water is wet.",
            "question": "What is wet?",
            "distractor1": "a",
            "distractor2": "b",
            "distractor3": "c",
            "correct_answer": "water",
        },
        ["Water is wet.\nQuestion: What is wet?\nAnswer:"] * 4,
        ["a", "b", "c", "water"],
        3,
    ),
    ("lambada", {"text": "he opened the old door\n"}, ["he opened the old"], ["door"], 0),
]


@pytest.mark.parametrize("name,row,contexts,answers,right", ROWS)
def test_questions(name, row, contexts, answers, right):
    assert TASKS[name].ask(row) == Question(tuple(contexts), tuple(answers), right)


def test_every_task_has_a_row_above():
    assert {row[0] for row in ROWS} == set(TASKS)


def numbered(count):
    return [choice(f"{n} + 1 =", [str(n + 1), str(n)], 0) for n in range(count)]


def test_examples_stand_solved_before_the_question():
    first, second, third = numbered(3)
    question = with_examples(first, [second, first], 1, seed=0)
    assert question.contexts == ("1 + 1 = 2\n\n0 + 1 =",) * 2
    assert (question.answers, question.right) == (first.answers, first.right)
    question = with_examples(first, [first, second, third], 2, seed=0)
    assert sorted(question.contexts[0].split("\n\n")) == ["0 + 1 =", "1 + 1 = 2", "2 + 1 = 3"]
    assert with_examples(first, [], 0, seed=0) is first


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def own(n):
    return {"context": f"{n} + 1 =", "choices": [str(n), str(n + 1)], "answer": 1}


def test_no_example_is_the_question_and_the_seed_decides(tmp_path):
    """Row 3 is there twice."""
    file = write(tmp_path / "sums.jsonl", [own(n) for n in (*range(8), 3)])
    [(label, questions)] = read_tasks([file], shots=7, seed=1).items()
    assert label == "sums" and len(questions) == 9
    for number, question in enumerate(questions):
        *examples, last = question.contexts[0].split("\n\n")
        asked = number % 8 if number < 8 else 3
        assert last == f"{asked} + 1 ="
        wanted = [f"{n} + 1 = {n + 1}" for n in range(8) if n != asked]
        assert sorted(examples) == wanted
    assert read_tasks([file], shots=2, seed=1) == read_tasks([file], shots=2, seed=1)
    assert read_tasks([file], shots=2, seed=1) != read_tasks([file], shots=2, seed=2)
    [limited] = read_tasks([file], shots=7, limit=3, seed=1).values()
    assert limited == questions[:3]
    with pytest.raises(UserError, match="the task sums has 8 rows .*: lower shots"):
        read_tasks([file], shots=8)


def test_files_of_tasks(tmp_path):
    words = tmp_path / "words.jsonl"
    content = '{"text": "a\u2028line and an end"}\n\n{"text": "one two"}'
    words.write_text(content, encoding="utf-8-sig")
    arc = write(tmp_path / "some.jsonl", [ARC])
    tasks = read_tasks([str(words), f"arc_easy={arc}"])
    assert tasks["words"] == [
        Question(("a\u2028line and an",), ("end",), 0),
        Question(("one",), ("two",), 0),
    ]
    assert tasks["arc_easy"] == [TASKS["arc_easy"].ask(ARC)]


@pytest.mark.parametrize(
    "content,message",
    [
        (json.dumps(ARC | {"answerKey": "5"}), "row 1 of .* no question of its kind: '5' is not"),
        (json.dumps({"question": "?"}), "row 1 of the task .* lacks 'choices'"),
        (json.dumps(ARC) + "\n" + json.dumps(ARC | {"choices": 3}), "row 2 of the task"),
        (json.dumps(ARC | {"choices": {"text": [1, 2], "label": ["1", "2"]}}), "is no text"),
        (json.dumps(ARC | {"choices": {"text": ["", "a"], "label": ["1", "2"]}}), "or empty"),
        ("", "arc.jsonl has no rows"),
        ("[1]", "line 1 of the task .* is no JSON object"),
        (json.dumps(ARC) + "\n{", "line 2 of the task .* is no JSON object"),
        ("[" * 100_000, "line 1 of the task .* is no JSON object"),
        ("\xff", "is no text in UTF-8"),
    ],
)
def test_hostile_files_are_told_in_a_line(tmp_path, content, message):
    file = tmp_path / "arc.jsonl"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message) as mistake:
        read_tasks([f"arc_easy={file}"])
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    "row,message",
    [
        ({"context": "a", "choices": ["b", "c"], "answer": 2}, "answer is number 2, and it has 2"),
        ({"context": "a", "choices": ["b", "c"], "answer": -1}, "answer is number -1"),
        ({"context": "a", "choices": ["b", "c"], "answer": "0"}, "answer is number '0'"),
        ({"context": 1, "choices": ["b", "c"], "answer": 0}, "context is no text"),
        ({"context": "a", "choices": [], "answer": 0}, "answer is number 0, and it has 0"),
        ({"context": "a", "choices": ["b"]}, "lacks 'answer'"),
        ({"text": " "}, "or empty"),
        ({"text": None}, "no question of its kind"),
        ({"text": "a \ud800"}, "surrogates not allowed"),
    ],
)
def test_hostile_rows_are_told_in_a_line(tmp_path, row, message):
    file = write(tmp_path / "mine.jsonl", [row])
    with pytest.raises(UserError, match=f"(row|line) 1 of the task .*{message}"):
        read_tasks([file])


@pytest.mark.parametrize("label", ["Infinity", "1e400", "-Infinity", "NaN", "9" * 5000])
def test_a_label_that_is_no_number_of_an_answer(tmp_path, label):
    rest = '"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["d", "e", "f", "g"]'
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"label": {label}, {rest}}}\n')
    with pytest.raises(UserError, match="(row|line) 1 of the task"):
        read_tasks([f"hellaswag={file}"])


@pytest.mark.parametrize(
    "names,message",
    [
        (["helaswag"], "no task 'helaswag': did you mean hellaswag"),
        (["helaswag=x.jsonl"], "cannot read the task helaswag=x.jsonl: No such file"),
        (["no.jsonl"], "cannot read the task no.jsonl: No such file"),
        (["piqa=."], "cannot read the task .: Is a directory"),
        (["a/x.jsonl", "a/x.jsonl"], "cannot read the task a/x.jsonl"),
    ],
)
def test_names_that_are_no_tasks_are_told_in_a_line(tmp_path, monkeypatch, names, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        read_tasks(names)


def test_two_tasks_of_one_name_are_refused(tmp_path):
    file = write(tmp_path / "mine.jsonl", [own(1)])
    with pytest.raises(UserError, match="two tasks are called mine"):
        read_tasks([file, file])


def test_accuracies_and_standard_errors_by_hand():
    """Of three questions: both right, right by characters only, neither; and one of no number."""
    questions = [
        Question(("",) * 2, ("aa", "bbbb"), 0),
        Question(("",) * 2, ("aa", "bbbb"), 1),
        Question(("",) * 2, ("aa", "bbbb"), 1),
        Question(("",) * 4, ("a", "b", "c", "d"), 0),
    ]
    sums = [(-1.0, -4.0), (-3.0, -4.0), (-1.0, -4.0), (math.nan, -1.0, -1.0, -1.0)]
    scores = [[Score(each, False) for each in row] for row in sums]
    found = result("mine", questions, scores)
    assert (found.questions, found.accuracy, found.accuracy_norm) == (4, 0.25, 0.5)
    # The deviation of 1, 0, 0, 0 is sqrt((0.75 ** 2 + 3 * 0.25 ** 2) / 3) = 0.5.
    assert found.accuracy_stderr == pytest.approx(0.5 / math.sqrt(4))
    assert found.accuracy_norm_stderr == pytest.approx(math.sqrt(1 / 3) / math.sqrt(4))
    assert found.chance == pytest.approx((3 * 0.5 + 0.25) / 4)
    assert math.isnan(accuracy([True])[1])


def test_last_words_by_hand():
    questions = [Question(("a",), ("b",), 0)] * 4
    scores = [[Score(-math.log(2**n), n == 0)] for n in range(4)]
    found = result("words", questions, scores)
    assert (found.accuracy, found.chance, found.accuracy_norm) == (0.25, 0.0, None)
    assert found.perplexity == pytest.approx(2 ** (6 / 4))
    assert found.measures().keys() == {
        "questions",
        "accuracy",
        "accuracy_stderr",
        "chance",
        "perplexity",
    }


class RandomScorer:
    """Scores without looking at the question."""

    def __init__(self):
        self.random = random.Random(0)

    def score(self, pairs, report):
        return [Score(-self.random.random() * len(text), False) for _, text in pairs]


@pytest.mark.parametrize("choices", [2, 4])
def test_guessing_has_the_accuracy_of_chance(choices):
    rows = [
        {"context": f"{n}", "choices": [f"{n}-{c}" for c in range(choices)], "answer": n % choices}
        for n in range(1000)
    ]
    tasks = {"mine": [multiple_choice(row) for row in rows]}
    [found] = Evaluation(RandomScorer(), tasks).results()
    assert found.chance == 1 / choices
    assert abs(found.accuracy - found.chance) < 3 * found.accuracy_stderr
    assert abs(found.accuracy_norm - found.chance) < 3 * found.accuracy_norm_stderr
