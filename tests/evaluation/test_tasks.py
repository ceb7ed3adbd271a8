"""Tasks of lm_eval: as it asks the model of transformers, on every rank alike."""

import builtins
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from tests.support.ranks import run_ranks
from tests.support.tasks import foxes, write_task
from tests.support.tiny import metrics, run_folder_of, tiny_config, tiny_tables, train, write_text
from tests.support.tokenizers import write_llama
from torchmars.cluster import connection
from torchmars.commands import export
from torchmars.config import ParallelismConfig
from torchmars.core.errors import UserError
from torchmars.evaluation.scoring import Scorer, measures_in_words
from torchmars.evaluation.tasks import HarnessModel, Tasks
from torchmars.exchange import saved_model
from torchmars.exchange.tokenizer_files import byte_pair_tokenizer
from torchmars.training.preparation import evaluation_tasks

LIKELIHOODS = ["multiple_choice", "loglikelihood", "loglikelihood_rolling"]


def answers_of(files, model, limit=None):
    """Return the figures that lm_eval has of tasks, and the log-likelihoods in their rows."""
    tasks = Tasks(files, shots=1, limit=limit)
    for task in tasks.tasks.values():
        task.set_fewshot_seed(1234)
    given = {"tasks": tasks.tasks, "groups": {}}
    found = evaluate(model, given, limit=limit, bootstrap_iters=100)
    rows = {
        name: [sample["filtered_resps"] for sample in samples]
        for name, samples in found["samples"].items()
    }
    figures = {
        (task, name): value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    return figures, rows


def scorer_of(folder, layout, patch, tp=1):
    """Return a scorer of the model in a folder on ranks with an axis tp, which no command has."""
    patch.setattr(saved_model, "ParallelismConfig", partial(ParallelismConfig, tp=tp))
    return Scorer(*saved_model.load_sharded_model(Path(folder), layout, "float32"), 2)


def ours(folder, files, tp):
    with pytest.MonkeyPatch.context() as patch:
        layout = connection.start(ParallelismConfig(tp=tp))
        batches = []
        model = HarnessModel(scorer_of(folder, layout, patch, tp), batches.append)
        found = answers_of(files, model)
        assert batches  # each beats the watchdog
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, whose export has the folder hf, and three tasks with rows of their own."""
    folder = tmp_path_factory.mktemp("run")
    write_text(folder)
    model = {"name": "llama", "n_head": 4, "n_kv_head": 2, "n_inner": 48}
    tables = tiny_tables(folder, model=model, training={"seq_len": 96}, optimizer={"lr": 1e-2})
    train(1, tables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", str(run_folder_of(tables)), str(folder / "hf")])
        export.main()
    ids = {bytes([byte]): byte for byte in range(256)}, None, {"<|endoftext|>": 256}
    byte_pair_tokenizer(*ids).save(str(folder / "hf" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    files = [write_task(folder, kind, kind, foxes(7)) for kind in LIKELIHOODS]
    return run_folder_of(tables), folder / "hf", files


@pytest.fixture(scope="module")
def theirs(run):
    _, folder, files = run
    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2)
    return answers_of(files, model)


@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2)], ids=["1 rank", "FSDP 2", "TP 2"])
def test_answers_are_those_of_lm_eval_with_transformers(run, theirs, ranks, tp):
    """Log-likelihoods to 1e-4 of a nat a token, which is a byte here; texts of several windows."""
    place, _, files = run
    expected, rows = theirs
    rows_of_kinds = foxes(7)
    for found, own in run_ranks(ours, ranks, str(place), files, tp):
        assert found == pytest.approx(expected, rel=1e-3) and len(found) > 8
        for kind in LIKELIHOODS:
            for row, mine, wanted in zip(rows_of_kinds, own[kind], rows[kind], strict=True):
                rolling = kind == "loglikelihood_rolling"
                texts = row["choices"] if kind == "multiple_choice" else [row["word"]]
                for text, one, other in zip([row["text"]] if rolling else texts, mine, wanted):
                    values = (one, float(other)) if rolling else (one[0], float(other[0]))
                    assert abs(values[0] - values[1]) < 1e-4 * (len(text) + 1), kind
                    assert rolling or one[1] == (str(other[1]) == "True")


@pytest.fixture
def own_group():
    yield
    connection.stop()


@pytest.mark.usefixtures("own_group")
def test_a_folder_whose_texts_begin_by_a_token_is_asked_as_lm_eval_asks_it(tmp_path, monkeypatch):
    """Contexts that are empty, blank, cut, of letters in several tokens; long texts; stop texts."""

    def asked(model, kind, *args):
        return getattr(model, kind)(
            [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in args]
        )

    write_llama(tmp_path)
    theirs = HFLM(pretrained=str(tmp_path), dtype="float32", device="cpu", batch_size=1)
    layout = connection.start(ParallelismConfig())
    ours = HarnessModel(scorer_of(tmp_path, layout, monkeypatch), lambda count: None)
    pairs = [
        ("The cat", " sat on"),
        ("", "The fox"),
        ("The cat ", " sat"),
        (" ", " x"),
        ("\u00e9", "\u65e5\u672c"),
        ("The cat sat on the mat " * 9, " fox"),
    ]
    expected = asked(theirs, "loglikelihood", *pairs)
    for (value, hit), (wanted, likeliest) in zip(asked(ours, "loglikelihood", *pairs), expected):
        assert value == pytest.approx(wanted, rel=1e-5) and hit == likeliest
    texts = [("The cat sat on",), ("The cat sat on \u00e9 xyz " * 9,)]
    rolling = asked(theirs, "loglikelihood_rolling", *texts)
    assert asked(ours, "loglikelihood_rolling", *texts) == pytest.approx(rolling, rel=1e-5)
    free = asked(ours, "generate_until", ("\u65e5", {"until": [], "max_gen_toks": 12}))[0]
    for until in ([], [free[2:4]], "zz", [free[-1:], free[1:3]]):
        request = "\u65e5", {"until": until, "max_gen_toks": 12}
        assert asked(ours, "generate_until", request) == asked(theirs, "generate_until", request)


CODE = """\
import os, random, numpy, torch

def rows(dataset):
    random.random(), numpy.random.rand(), torch.rand(1)
    return dataset

def text(row):
    random.random(), numpy.random.rand(), torch.rand(1)
    return row["context"]

def of_this_process(row):
    return row["context"] + str(os.getpid())
"""


def test_a_run_that_is_asked_has_the_bits_of_one_that_is_not(tmp_path):
    """With dropout, and a task whose code draws from all generators."""
    write_text(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    settings = {"process_docs": "!function own.rows", "doc_to_text": "!function own.text"}
    files = [
        write_task(tmp_path, "foxes", "multiple_choice", foxes(5), **settings),
        write_task(tmp_path, "words", "generate_until", foxes(2)),
    ]
    runs = [
        tiny_tables(
            tmp_path,
            run={"name": name},
            model={"dropout": 0.2},
            training={"steps": 6},
            evaluation={"tasks": tasks, "interval": 2, "shots": 1, "limit": 4},
        )
        for name, tasks in (("asked", files), ("plain", []))
    ]
    train(2, *runs)
    asked, plain = map(metrics, runs)
    assert asked == plain and len(asked) == 6
    accuracy = metrics(runs[0], "evaluation/foxes/acc")
    assert list(accuracy) == [2, 4, 6] and 0 <= accuracy[6] <= 1
    assert metrics(runs[0], "evaluation/foxes/sample_len")[6] == 4
    assert list(metrics(runs[0], "evaluation/words/exact_match")) == [2, 4, 6]


def asked_by_process(folder, file):
    with pytest.MonkeyPatch.context() as patch:
        layout = connection.start(ParallelismConfig())
        scorer = scorer_of(folder, layout, patch)
        return Tasks([file]).ask(scorer)


def test_ranks_score_the_texts_of_the_first_whatever_a_task_does(run, tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    code = {"doc_to_text": "!function own.of_this_process"}
    file = write_task(tmp_path, "words", "loglikelihood", foxes(3), **code)
    first, second = run_ranks(asked_by_process, 2, str(run[0]), file)
    assert first == second and first["words"]["sample_len"] == 3


def test_examples_and_limits(tmp_path):
    """The task's own number of examples stands unless another is asked for, and 0 always."""
    rows = foxes(5)
    plain = write_task(tmp_path, "plain", "multiple_choice", rows)
    two = write_task(tmp_path, "two", "multiple_choice", rows, num_fewshot="2")
    none = write_task(tmp_path, "none", "multiple_choice", rows, num_fewshot="0")

    def contexts(**settings):
        tasks = Tasks([plain, two, none], **settings)
        texts = [[each.args[0] for each in task.instances] for task in tasks.tasks.values()]
        return tasks.requests, [{text.count("\n\n") for text in each} for each in texts]

    assert contexts() == (30, [{0}, {2}, {0}])
    assert contexts(shots=1, limit=3) == (18, [{1}, {1}, {0}])
    tasks = Tasks([plain], shots=2)
    before = [each.args for each in tasks.tasks["plain"].instances]
    assert before == [each.args for each in Tasks([plain], shots=2).tasks["plain"].instances]


def test_a_line_has_each_measurement_with_its_error():
    values = {"sample_len": 1200, "acc": 0.25, "acc_stderr": 0.125}
    values |= {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.0625}
    line = "x sample_len 1,200, acc 0.2500 ± 0.1250, exact_match,strict 0.5000 ± 0.0625"
    assert measures_in_words("x", values) == line


def broken(folder, **settings):
    return write_task(folder, "broken", "multiple_choice", foxes(2), **settings)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda folder: "nothing.yaml", r"cannot read the task nothing.yaml \(KeyError"),
        (lambda folder: broken(folder, task="[1, "), r"cannot read the task .*broken.yaml \(Pars"),
        (lambda folder: broken(folder, output_type="x"), "ValueError: Got invalid output_type 'x'"),
        (
            lambda folder: broken(folder, dataset_kwargs="{data_files: {test: no.jsonl}}"),
            "no.jsonl",
        ),
        (lambda folder: broken(folder, doc_to_text="'{{nothing}}'"), "nothing"),
        (lambda folder: broken(folder, doc_to_text="!function gone.text"), "gone"),
        (lambda folder: broken(folder, unsafe_code="true"), "runs code that a model writes"),
        (lambda folder: "s3://key:secret@b/x.yaml", "a task must be"),
    ],
)
def test_a_task_that_cannot_be_read_is_a_line(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as mistake:
        Tasks([make(tmp_path)])
    assert "\n" not in str(mistake.value) and "secret" not in str(mistake.value)


def test_a_row_that_is_no_question_is_found_before_the_run(tmp_path):
    rows = [*foxes(3), {"context": None}]
    file = write_task(tmp_path, "foxes", "multiple_choice", rows)
    with pytest.raises(UserError, match=r"cannot ask the task foxes \("):
        Tasks([file])
    assert Tasks([file], limit=3).requests == 6
    with pytest.raises(UserError, match="two tasks are called foxes"):
        Tasks([file, file], limit=3)
    with pytest.raises(UserError, match=r"cannot ask the task foxes \("):
        Tasks([file], shots=9, limit=3)


def test_lm_eval_is_imported_where_a_task_is_named_and_may_be_absent(tmp_path, monkeypatch):
    imports, real = [], builtins.__import__

    def absent(name, *args):
        imports.append(name)
        if name == "torchmars.evaluation.tasks":
            raise ImportError("lm_eval")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert evaluation_tasks(tiny_config(tmp_path)) is None
    never = {"tasks": ["x"], "interval": 0}
    assert evaluation_tasks(tiny_config(tmp_path, evaluation=never)) is None
    assert "torchmars.evaluation.tasks" not in imports
    config = tiny_config(tmp_path, evaluation={"tasks": ["x"]})
    with pytest.raises(
        UserError, match=r"evaluation.tasks: a task needs the package lm_eval.*\[eval\]"
    ):
        evaluation_tasks(config)
