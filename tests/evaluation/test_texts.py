"""Bits per byte: the bytes are those of the text, whatever the tokenizer makes of it."""

from types import SimpleNamespace

import pytest

from tests.support.tokenizers import KINDS
from torchmars.config import DataConfig
from torchmars.data.prepare import prepare_shards
from torchmars.data.tokenizer import load_tokenizer
from torchmars.evaluation import texts
from torchmars.evaluation.scoring import Score, Scorer, Tokens

DOCUMENTS = ["The quick Füchse jump over 日本, foxes! \n", "on  the\tcat's é\n", "fox " * 30]


class Fixed:
    """A scorer without a model, of which each token has a nat."""

    seq_len = 5
    layout = SimpleNamespace(say=print)
    tokens, windows = Scorer.tokens, Scorer.windows

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def score_tokens(self, windows, report):
        return [Score(-float(window.count), False) for window in windows]


def measured(scorer, windows, count=None):
    return texts.measure_text(scorer, "x", windows, count or len(windows), lambda done: None)


def tokenizer_of(kind, folder):
    if kind not in KINDS:
        return load_tokenizer(kind)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
def test_bytes_of_files_are_their_own(kind, tmp_path):
    scorer = Fixed(tokenizer_of(kind, tmp_path))
    file = tmp_path / "text.txt"
    file.write_text("<|endoftext|>\n".join(DOCUMENTS))
    windows = texts.windows_of_files(str(file), scorer)
    found = measured(scorer, windows)
    assert found.bytes == sum(len(text.encode()) for text in DOCUMENTS) and not found.decoded
    parts = [measured(scorer, windows[number:], 1) for number in range(len(windows))]
    assert sum(part.bytes for part in parts) == found.bytes


def test_a_document_of_which_no_token_is_left_has_its_bytes_too(tmp_path):
    scorer = Fixed(tokenizer_of("WordPiece", tmp_path))
    file = tmp_path / "text.txt"
    file.write_text("\u200b\n<|endoftext|>\nthe fox")
    found = measured(scorer, texts.windows_of_files(str(file), scorer))
    assert (found.tokens, found.bytes) == (2, file.stat().st_size - len("<|endoftext|>\n"))


def shards(folder, source, tokenizer, documents=(), begin_token="none"):
    """Return the manifest of a corpus, whose folder is `folder`/shards."""
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    data = DataConfig(
        source,
        [str(folder / "text.txt")] if documents else [],
        path=str(folder / "shards"),
        tokenizer=tokenizer,
        begin_token=begin_token,
        validation_fraction=0.3,
        processes=1,
    )
    return prepare_shards(data.resolve())


MANY = [f"The Füchse {n} of 日本 é, foxes" for n in range(60)]


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
def test_bytes_of_shards_are_those_that_were_counted(kind, tmp_path):
    """But for the first token, and those after the last window, which are not scored."""
    tokenizer = tokenizer_of(kind, tmp_path)
    manifest = shards(tmp_path, "text", tokenizer.name, MANY)
    windows = texts.ShardWindows(tmp_path / "shards", Fixed(tokenizer))
    found = measured(Fixed(tokenizer), windows)
    unscored = manifest.splits["validation"].tokens - found.tokens
    known = manifest.text_bytes["validation"]
    assert unscored <= 5 and known * (1 - 0.2 * unscored) <= found.bytes <= known
    assert not found.decoded and "decode" not in "".join(texts.texts_table([found]))


@pytest.mark.parametrize("kind,begin_token", [("bytes", "F"), ("WordPiece", "fox")])
def test_a_token_that_begins_documents_is_no_text_of_theirs(kind, begin_token, tmp_path):
    tokenizer, each = tokenizer_of(kind, tmp_path), len(MANY[0].encode()) + 1
    manifest = shards(tmp_path, "text", tokenizer.name, MANY, begin_token)
    known, split = manifest.text_bytes["validation"], manifest.splits["validation"]
    assert abs(known - split.documents * each) <= split.documents
    found = measured(Fixed(tokenizer), texts.ShardWindows(tmp_path / "shards", Fixed(tokenizer)))
    # Tokens that are not scored have their share of the text, and less than 5 bytes a token.
    assert known - 5 * (1 + split.tokens - found.tokens) <= found.bytes <= known


def test_a_text_is_scored_after_the_token_that_documents_begin_with():
    scorer = Fixed(load_tokenizer("bytes", "a"))
    assert [each.ids for each in scorer.windows("fox")] == [[97, *b"fox"]]
    assert scorer.tokens("", "fox") == Tokens([97, *b"fox"], 3)
    assert scorer.tokens("o", "x") == Tokens([97, *b"ox"], 1)


@pytest.mark.parametrize("kind", ["bytes", "byte level"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_letter_that_chunks_cut_has_its_own_bytes(kind, chunk, tmp_path, monkeypatch):
    """Tokens are bytes, letters have three, and windows five."""
    monkeypatch.setattr(texts, "CHUNK", chunk)
    monkeypatch.setattr(texts, "PIECE", 7)
    tokenizer = tokenizer_of(kind, tmp_path)
    documents = ["日本語日本語日本語" * n for n in range(1, 9)]
    manifest = shards(tmp_path, "text", tokenizer.name, documents)
    found = measured(Fixed(tokenizer), texts.ShardWindows(tmp_path / "shards", Fixed(tokenizer)))
    ends = manifest.splits["validation"].documents
    # The first letter and the last one may be cut: what is left of one counts as U+FFFD.
    assert found.bytes == pytest.approx(found.tokens - ends, abs=1 if kind == "bytes" else 5)


def test_of_tokens_without_a_text_it_is_said_that_they_were_decoded(tmp_path):
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode_batch(["The Füchse, " * 20])
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(ids.tobytes())
    shards(tmp_path, f"nanogpt:{tmp_path}", "bytes")
    found = measured(Fixed(tokenizer), texts.ShardWindows(tmp_path / "shards", Fixed(tokenizer)))
    assert found.decoded and found.bytes == found.tokens
    assert "bytes of x are counted from its decoded tokens" in texts.texts_table([found])[-1]
