"""Log-likelihoods, on every kind of layout those of the plain model."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.full import full_but
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.real_data import FOLDER, needs_data
from tests.support.tiny import tiny_config
from torchmars.cluster import connection
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.evaluation.results import Evaluation
from torchmars.evaluation.rows import read_tasks
from torchmars.evaluation.scoring import Scorer, Tokens
from torchmars.evaluation.texts import measure_text
from torchmars.models import build_meta_model, build_model
from torchmars.models.initialize import init_weights
from torchmars.parallel.parallel_model import ParallelModel

SEQ_LEN, VOCABULARY = 32, 257
MODEL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "name": "llama", "n_kv_head": 4, "n_inner": 48}
# Empty contexts, blanks at the end of one, texts longer than the model sees, some of one token.
PAIRS = [
    ("The fox", " went over"),
    ("", "the hill"),
    ("The old fox ", "is red"),
    ("a" * 40, " end"),
    ("b", "c" * 50),
    (" ", "d"),
    ("e", " f"),
]


def config_of(layout):
    return tiny_config(
        Path("/nowhere"), model=MODEL, parallelism=LAYOUTS[layout][1], training={"dtype": "float32"}
    )


def scorer_on(layout, seq_len=SEQ_LEN, batch_size=2):
    """Return a scorer by a model with random weights on the ranks of this process group."""
    config = config_of(layout)
    ranks = connection.start(config.parallelism)
    model = ParallelModel(
        build_meta_model(config.model, VOCABULARY, seq_len),
        config.parallelism,
        config.training,
        config.activation_checkpoint,
        ranks,
        ranks.device,
    )
    model.init_weights(0)
    return Scorer(model, ranks, ByteTokenizer(), batch_size)


def scores_on(layout, texts):
    """Return the scores of PAIRS and of `texts`, and how well a text is predicted."""
    scorer = scorer_on(layout)
    counts = []
    scores = scorer.score(PAIRS, counts.append)
    assert sum(counts) == len(PAIRS)
    windows = scorer.windows("The red fox went over the hill. " * 3)
    text = measure_text(scorer, "text", windows, len(windows), counts.append)
    return scores, scorer.score_tokens(texts), text


@pytest.fixture(scope="module")
def plain():
    model = build_model(config_of("1 rank").model, VOCABULARY, SEQ_LEN).eval()
    init_weights(model, 0)
    return model


def greedy(model, ids, count):
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model.head(model(torch.tensor([ids])))[0, -1].argmax())]
    return ids


def log_likelihood(model, ids, count):
    with torch.no_grad():
        logits = model.head(model(torch.tensor([ids[:-1]])))[0]
    found = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return float(found[-count:].double().sum())


EVALUATED = ["FSDP 2", "TP 2 x CP 2", "PP 2 x FSDP 2"]


@pytest.mark.parametrize("layout", full_but(["FSDP 2"], EVALUATED))
def test_scores_are_those_of_the_plain_model(plain, layout):
    likely = greedy(plain, [256, 1, 2], 8)
    other = [*likely[:-2], (likely[-2] + 1) % VOCABULARY, likely[-1]]
    texts = [Tokens(likely, 8), Tokens(likely, 3), Tokens(other, 8), Tokens(other, 1)]
    [(found, of_texts, text), *others] = run_ranks(scores_on, LAYOUTS[layout][0], layout, texts)
    assert all(each == (found, of_texts, text) for each in others)
    assert [score.likeliest for score in of_texts[:3]] == [True, True, False]
    for score, each in zip(of_texts, texts):
        expected = log_likelihood(plain, each.ids, each.count)
        assert score.log_likelihood == pytest.approx(expected, abs=1e-4)
    cut = [  # as EleutherAI's harness cuts the ends off: 33 tokens, of which the model sees 32
        ([*b"The fox went over"], 10),
        ([256, *b"the hill"], 8),
        ([*b"The old fox is red"], 7),
        ([*b"a" * 29, *b" end"], 4),
        ([*b"c" * 33], 32),
        ([256, *b" d"], 2),
        ([*b"e f"], 2),
    ]
    for score, (ids, count) in zip(found, cut, strict=True):
        assert score.log_likelihood == pytest.approx(log_likelihood(plain, ids, count), abs=1e-4)
    ids = [256, *(b"The red fox went over the hill. " * 3)]
    windows = [(ids[:33], 32), (ids[32:65], 32), (ids[64:], 32)]
    nats = -sum(log_likelihood(plain, *window) for window in windows)
    assert (text.tokens, text.bytes) == (96, 96)
    assert text.nats == pytest.approx(nats, abs=1e-3)
    assert text.loss == pytest.approx(nats / 96, abs=1e-5)
    assert text.perplexity == pytest.approx(math.exp(nats / 96), rel=1e-5)
    assert text.bits_per_byte == pytest.approx(nats / 96 / math.log(2), abs=1e-5)


class Seen:
    """A scorer without a model."""

    tokenizer, seq_len = ByteTokenizer(), 4
    tokens, windows = Scorer.tokens, Scorer.windows


def test_windows_have_each_token_once_after_as_many_as_the_model_sees():
    assert Seen().windows("abcdefghij") == [
        Tokens([256, *b"abcd"], 4),
        Tokens([*b"defgh"], 4),
        Tokens([*b"fghij"], 2),
    ]
    assert Seen().windows("") == []
    assert Seen().windows("a") == [Tokens([256, ord("a")], 1)]


class Pairs(ByteTokenizer):
    """Takes two letters for a token."""

    def encode_batch(self, texts):
        return super().encode_batch([text[::2] for text in texts])


def test_a_text_that_begins_in_the_last_token_of_its_context_has_that_token():
    seen = Seen()
    seen.tokenizer = Pairs()
    assert seen.tokens("abc", "d") == Tokens([*b"ac"], 1)


def results_by_random_weights(names):
    scorer = scorer_on("FSDP 2", seq_len=128, batch_size=64)
    return Evaluation(scorer, read_tasks(names)).results()


@pytest.mark.slow
@needs_data("hellaswag", "multiple_choice")
def test_random_weights_have_the_accuracy_of_chance():
    files = {"hellaswag": "hellaswag", "arc_easy": "multiple_choice", "piqa": "multiple_choice"}
    names = [f"{task}={FOLDER / folder / f'{task}_val.jsonl'}" for task, folder in files.items()]
    for result in run_ranks(results_by_random_weights, 2, names)[0]:
        print(result.describe())
        assert abs(result.accuracy - result.chance) < 3 * result.accuracy_stderr
        assert abs(result.accuracy_norm - result.chance) < 3 * result.accuracy_norm_stderr
