"""Log-likelihoods, on every kind of layout those of the plain model, and bits per byte of files."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.full import full_but
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config
from tests.support.tokenizers import KINDS
from torchmars.cluster import connection
from torchmars.data.tokenizer import ByteTokenizer, load_tokenizer
from torchmars.evaluation import scoring
from torchmars.evaluation.scoring import (
    Scorer,
    Tokens,
    measure_text,
    windows_after,
    windows_of_files,
)
from torchmars.evaluation.tasks import HarnessModel
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


def scorer_on(layout):
    """Return a scorer by a model with random weights on the ranks of this process group."""
    config = config_of(layout)
    ranks = connection.start(config.parallelism)
    model = ParallelModel(
        build_meta_model(config.model, VOCABULARY, SEQ_LEN),
        config.parallelism,
        config.training,
        config.activation_checkpoint,
        ranks,
        ranks.device,
    )
    model.init_weights(0)
    return Scorer(model, ByteTokenizer(), 2)


def scores_on(layout, texts, file):
    """Return the scores of PAIRS and of `texts`, in batches of few, and how a file is predicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "FULL", 1)
        scorer = scorer_on(layout)
    counts = []
    requests = [SimpleNamespace(args=pair) for pair in PAIRS]
    scores = HarnessModel(scorer, counts.append).loglikelihood(requests)
    assert sum(counts) == len(PAIRS) and len(counts) > 1
    text = measure_text(scorer, windows_of_files(file, scorer))
    return scores, scorer.score(texts), text


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
def test_scores_are_those_of_the_plain_model(plain, layout, tmp_path):
    likely = greedy(plain, [256, 1, 2], 8)
    other = [*likely[:-2], (likely[-2] + 1) % VOCABULARY, likely[-1]]
    texts = [Tokens(likely, 8), Tokens(likely, 3), Tokens(other, 8), Tokens(other, 1)]
    (tmp_path / "text.txt").write_text("The red fox went over the hill. " * 3)
    given = LAYOUTS[layout][0], layout, texts, str(tmp_path / "text.txt")
    [(found, of_texts, text), *others] = run_ranks(scores_on, *given)
    assert all(each == (found, of_texts, text) for each in others)
    assert [likeliest for _, likeliest in of_texts[:3]] == [True, True, False]
    cut = [  # as lm_eval cuts the ends off: 33 tokens, of which the model sees 32
        Tokens([*b"The fox went over"], 10),
        Tokens([256, *b"the hill"], 8),
        Tokens([*b"The old fox is red"], 7),
        Tokens([*b"a" * 29, *b" end"], 4),
        Tokens([*b"c" * 33], 32),
        Tokens([256, *b" d"], 2),
        Tokens([*b"e f"], 2),
    ]
    for (value, _), each in zip([*of_texts, *found], [*texts, *cut], strict=True):
        assert value == pytest.approx(log_likelihood(plain, each.ids, each.count), abs=1e-4)
    ids = [256, *(b"The red fox went over the hill. " * 3)]
    windows = [(ids[:33], 32), (ids[32:65], 32), (ids[64:], 32)]
    loss = -sum(log_likelihood(plain, *window) for window in windows) / 96
    assert (text["tokens"], text["bytes"]) == (96, 96)
    assert text["loss"] == pytest.approx(loss, abs=1e-5)
    assert text["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert text["bits_per_byte"] == pytest.approx(loss / math.log(2), abs=1e-5)


def test_windows_have_each_token_once_after_as_many_as_the_model_sees():
    assert windows_after([256], [*b"abcdefghij"], 4) == [
        Tokens([256, *b"abcd"], 4),
        Tokens([*b"defgh"], 4),
        Tokens([*b"fghij"], 2),
    ]
    assert windows_after([256], [], 4) == []
    assert windows_after([256], [97], 4) == [Tokens([256, 97], 1)]


class Fixed:
    """A scorer without a model, of which each token has a nat."""

    seq_len, report = 5, None
    layout = SimpleNamespace(say=print, broadcast=lambda value, rank: value)

    def __init__(self, tokenizer):
        self.tokenizer, self.model = tokenizer, self

    def score(self, texts, report):
        self.texts = texts
        return [(-float(text.count), False) for text in texts]


class Pairs(ByteTokenizer):
    """Takes two letters for a token."""

    def encode(self, text):
        return super().encode(text[::2])


@pytest.mark.parametrize(
    "tokenizer,pair,expected",
    [
        (Pairs(), ("abc", "d"), Tokens([*b"ac"], 1)),  # it begins in its context's last token
        (load_tokenizer("bytes", "a"), ("", "fox"), Tokens([97, *b"fox"], 3)),
        (load_tokenizer("bytes", "a"), ("o", "x"), Tokens([97, *b"ox"], 1)),
    ],
)
def test_tokens_of_a_text_after_a_context(tokenizer, pair, expected):
    scorer = Fixed(tokenizer)
    HarnessModel(scorer, print).loglikelihood([SimpleNamespace(args=pair)])
    assert scorer.texts == [expected]


DOCUMENTS = [
    "The quick F\u00fcchse jump over \u65e5\u672c, foxes! \n",
    "on  the\tcat's \u00e9\n",
    "fox " * 30 + "\n",
]


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
def test_bytes_of_files_are_their_own_whatever_a_tokenizer_makes_of_them(kind, tmp_path):
    """Also of documents of which no token is left, and after every number of windows."""
    if kind in KINDS:
        KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    scorer = Fixed(load_tokenizer(str(tmp_path) if kind in KINDS else "bytes"))
    file = tmp_path / "text.txt"
    documents = ["\u200b\n", *DOCUMENTS, "\u200b"]
    file.write_text("<|endoftext|>\n".join(documents))
    windows = windows_of_files(str(file), scorer)
    found = measure_text(scorer, windows)
    assert found["bytes"] == sum(len(text.encode()) for text in documents)
    parts = [measure_text(scorer, [window]) for window in windows]
    rounded = sum(part["bytes"] for part in parts)  # each token has those of the mean one
    assert abs(rounded - found["bytes"]) <= len(parts) / 2
    assert sum(part["tokens"] for part in parts) == found["tokens"] and found["loss"] == 1


def test_a_text_is_scored_after_the_token_that_documents_begin_with(tmp_path):
    (tmp_path / "text.txt").write_text("fox")
    scorer = Fixed(load_tokenizer("bytes", "a"))
    found = windows_of_files(str(tmp_path / "text.txt"), scorer)
    assert [each.ids for each in found] == [[97, *b"fox"]]
