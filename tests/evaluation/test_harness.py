"""The same items by EleutherAI's harness and by ours, on an export of a run."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import tiktoken

from tests.support.ranks import run_ranks
from tests.support.real_data import FOLDER, needs_data
from tests.support.tiny import run_folder_of, tiny_tables, train
from tests.support.tokenizers import write_llama
from torchmars.cluster import connection
from torchmars.commands import export
from torchmars.config import ParallelismConfig
from torchmars.data.tokenizer import load_tokenizer
from torchmars.evaluation.results import Evaluation
from torchmars.evaluation.rows import read_tasks
from torchmars.evaluation.scoring import Scorer, Tokens
from torchmars.exchange.saved_model import load_sharded_model
from torchmars.exchange.tokenizer_files import byte_pair_tokenizer

lm_eval = pytest.importorskip("lm_eval")
# Items of HellaSwag by tokenizer: all of them by the one whose vocabulary is small.
ITEMS = {"gpt2": 200, "bytes": 10_042}
HELLASWAG = FOLDER / "hellaswag" / "hellaswag_val.jsonl"
# The harness's own HellaSwag, but for the rows: here is a file whose two contexts are joined.
TASK = """\
task: hellaswag_of_a_file
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: multiple_choice
validation_split: validation
test_split: null
training_split: null
process_docs: !function rows.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
ROWS = """\
from lm_eval.tasks.hellaswag.utils import preprocess


def process_docs(dataset):
    def question(row):
        return {
            "query": preprocess(row["activity_label"] + ": " + row["ctx"]),
            "choices": [preprocess(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }

    return dataset.map(question)
"""


def scores_of(folder, names, limit):
    """Return the results of a task, and the score of each answer, on these ranks."""
    layout = connection.start(ParallelismConfig())
    model, tokenizer = load_sharded_model(Path(folder), layout, "float32")
    tasks = read_tasks(names, limit=limit)
    scorer = Recording(model, layout, tokenizer, 32)
    return Evaluation(scorer, tasks).results(), scorer.scores


class Recording(Scorer):
    """Keeps what it has scored."""

    def score(self, pairs, report):
        self.scores = super().score(pairs, report)
        return self.scores


def write_tokenizer(name, folder):
    """Put a tokenizer into a folder, unless it is there."""
    if not (folder / "tokenizer.json").exists():
        end = "<|endoftext|>"
        if name == "bytes":
            parts = {bytes([byte]): byte for byte in range(256)}, None, {end: 256}
        else:
            gpt2 = tiktoken.get_encoding("gpt2")
            parts = gpt2._mergeable_ranks, gpt2._pat_str, gpt2._special_tokens
        byte_pair_tokenizer(*parts).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def gpt2_files(tmp_path, monkeypatch):
    shutil.copytree(FOLDER / "tiktoken_cache", tmp_path / "bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))


def exported(tokenizer, folder, monkeypatch):
    """Return a run after some steps, and its export."""
    text = (FOLDER / "tinyshakespeare" / "input.txt").read_text()
    (folder / "text.txt").write_text(text.replace("\n\n", "\n<|endoftext|>\n"))
    tables = tiny_tables(
        folder,
        data={"tokenizer": tokenizer},
        training={"steps": 30, "seq_len": 512, "global_batch_size": 4},
        optimizer={"lr": 3e-3},
    )
    train(2, tables)
    run = run_folder_of(tables)
    monkeypatch.setattr(sys, "argv", ["export", str(run), str(folder / "hf")])
    export.main()
    write_tokenizer(tokenizer, folder / "hf")
    return run, folder / "hf"


@pytest.mark.slow
@needs_data("tiktoken_cache", "tinyshakespeare", "hellaswag")
@pytest.mark.parametrize("tokenizer", ITEMS)
def test_hellaswag_is_that_of_the_harness(tokenizer, gpt2_files, tmp_path, monkeypatch):
    run, folder = exported(tokenizer, tmp_path, monkeypatch)
    (tmp_path / "task.yaml").write_text(TASK.format(file=HELLASWAG))
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["hellaswag_of_a_file"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
        limit=ITEMS[tokenizer],
        batch_size=32,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    figures = theirs["results"]["hellaswag_of_a_file"]
    samples = sorted(theirs["samples"]["hellaswag_of_a_file"], key=lambda sample: sample["doc_id"])
    answers = [answer for sample in samples for answer in sample["filtered_resps"]]
    name = f"hellaswag={HELLASWAG}"
    for place, ranks in [(folder, 1), (run, 2)][: 1 + (tokenizer == "gpt2")]:
        [result], scores = run_ranks(scores_of, ranks, str(place), [name], ITEMS[tokenizer])[0]
        apart = 0.0
        for (log_likelihood, likeliest), score in zip(answers, scores, strict=True):
            expected = float(log_likelihood)
            difference = abs(score.log_likelihood - expected)
            apart = max(apart, difference)
            # It adds up in float32: hundreds of bytes have no more digits.
            assert difference < max(1e-4, 5e-7 * abs(expected))
            assert score.likeliest == (str(likeliest) == "True")
        print(json.dumps(figures), result.describe(), f"{apart:.2e} apart of {len(scores)}")
        assert result.accuracy == figures["acc,none"]
        assert result.accuracy_norm == figures["acc_norm,none"]


@pytest.fixture
def own_process_group():
    yield
    connection.stop()


@pytest.mark.usefixtures("own_process_group")
def test_a_folder_whose_texts_begin_by_a_token_is_asked_as_the_harness_asks_it(tmp_path):
    """Contexts that are empty, blank, cut, of letters in several tokens; long texts; stop texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from torchmars.evaluation.harness import HarnessModel

    def asked(model, kind, *args):
        return getattr(model, kind)(
            [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in args]
        )

    write_llama(tmp_path)
    theirs = HFLM(pretrained=str(tmp_path), dtype="float32", device="cpu", batch_size=1)
    ours = HarnessModel(str(tmp_path))
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


def test_the_begin_token_of_a_run_is_no_part_of_a_text():
    from torchmars.evaluation.harness import HarnessModel

    scorer = Scorer.__new__(Scorer)
    scorer.seq_len, scorer.tokenizer = 8, load_tokenizer("bytes", "a")
    model = HarnessModel.__new__(HarnessModel)
    model.scorer, model.tokenizer = scorer, scorer.tokenizer
    assert model.windows("fox") == [Tokens([97, *b"fox"], 3, 3)]
