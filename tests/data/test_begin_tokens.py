"""Documents that begin with a token: which one it is, where it stands, and one border each."""

import numpy as np
import pytest
import tiktoken

from tests.support.real_data import FOLDER, needs_data
from tests.support.tiny import tiny_config
from tests.support.tokenizers import KINDS, llama_2, write_tokenizer
from torchmars.core.errors import UserError
from torchmars.data import corpus
from torchmars.data import windows as packing
from torchmars.data.manifest import read_manifest
from torchmars.data.prepare import prepare_shards
from torchmars.data.tokenizer import load_tokenizer
from torchmars.data.windows import (
    Mixture,
    MixturePart,
    PackedWindows,
    best_fit_windows,
    pack_shards,
)
from torchmars.models.documents import begins

transformers = pytest.importorskip("transformers")
TEXTS = [f"The cat {n} sat on é" + " fox" * (n % 7) for n in range(60)]


def write_texts(folder, texts=TEXTS):
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(texts))


def config_of(folder, tokenizer, begin_token, **data):
    named = {"tokenizer": str(tokenizer), "begin_token": begin_token}
    return tiny_config(folder, data=named | data).data


def tokens_of(folder, split="train"):
    manifest = read_manifest(folder)
    parts = [
        np.fromfile(folder / each.file, f"<{np.dtype(manifest.dtype).str[1:]}")
        for each in manifest.splits[split].shards
    ]
    return np.concatenate(parts).astype(int).tolist()


@pytest.mark.parametrize("template", ["<s> $A", "</s> $A", "<s> $A </s>", "$A </s>"])
def test_auto_is_what_transformers_puts_before_a_text(template, tmp_path):
    """Where it puts none, or the one that ends documents, it is as with none."""
    first = write_tokenizer(tmp_path, template)("The").input_ids[0]
    assert load_tokenizer(str(tmp_path), "auto").begin_token == (1 if first == 1 else None)
    assert load_tokenizer("bytes", "auto").begin_token is None


def test_auto_needs_no_token_of_a_text(tmp_path):
    from tokenizers import Tokenizer, models, processors

    named = {"<s>": 0, "</s>": 1}
    tokenizer = Tokenizer(models.BPE({**named, "C": 2, "G": 3}, []))  # without one for "a"
    template = processors.TemplateProcessing("<s> $A </s>", special_tokens=[*named.items()])
    tokenizer.post_processor = template
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path), "auto").begin_token == 0


def test_several_tokens_before_a_text_are_no_single_one(tmp_path):
    file = tmp_path / "tokenizer.json"
    llama_2("<s> <s> $A").save(str(file))
    with pytest.raises(UserError, match='data.begin_token: "auto" is no single token of data.tok'):
        load_tokenizer(str(file), "auto")
    assert load_tokenizer(str(file), "<s>").begin_token == 1


@pytest.mark.parametrize(
    "kind,text", [("Llama 2", "<turn>"), ("byte level", "日"), ("bytes", "ab")]
)
def test_a_text_that_is_no_single_token_is_one_line(kind, text, tmp_path):
    name = kind
    if kind in KINDS:
        name = str(tmp_path)
        KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    if text == "<turn>":  # a token that is not special is one too
        assert load_tokenizer(name, text).begin_token == 3
        text = "<turn> "
    for wrong in (text, "", "no such", "\ud800"):
        with pytest.raises(UserError, match=r"^data.begin_token: .* is no single token of [^\n]*$"):
            load_tokenizer(name, wrong)


@needs_data("tiktoken_cache")
def test_a_token_of_tiktoken_is_named_by_its_text(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(FOLDER / "tiktoken_cache"))
    theirs = tiktoken.get_encoding("gpt2")
    for text in (" the", "\n", "é"):
        assert load_tokenizer("gpt2", text).begin_token == theirs.encode_single_token(text)
    for text in ("<|endoftext|>", "auto"):
        assert load_tokenizer("gpt2", text).begin_token is None
    with pytest.raises(UserError, match='"<s>" is no single token'):
        load_tokenizer("gpt2", "<s>")


@pytest.mark.parametrize("begin_token", ["auto", "<turn>"])
def test_shards_are_what_the_package_makes_of_each_document(begin_token, tmp_path):
    theirs = write_tokenizer(tmp_path)
    write_texts(tmp_path)
    manifest = prepare_shards(config_of(tmp_path, tmp_path, begin_token))
    begin = theirs.convert_tokens_to_ids("<s>" if begin_token == "auto" else begin_token)
    assert manifest.begin_token == read_manifest(tmp_path / "shards").begin_token == begin
    found = tokens_of(tmp_path / "shards", "train") + tokens_of(tmp_path / "shards", "validation")
    documents = []
    for place, token in enumerate(found):
        documents += [[]] if token == begin and (place == 0 or found[place - 1] == 2) else []
        documents[-1].append(token)
    expected = [
        [begin, *theirs(text + "\n" * (text != TEXTS[-1]), add_special_tokens=False).input_ids, 2]
        for text in TEXTS
    ]
    assert sorted(documents) == sorted(expected)
    assert sum(split.documents for split in manifest.splits.values()) == len(TEXTS)


@pytest.mark.parametrize("begin_token", ["none", "a"])
def test_bits_per_byte_count_the_text_alone(begin_token, tmp_path):
    """Of a single document the tail is the validation split, also where a token stands before."""
    write_texts(tmp_path, ["Größe abc" * 400])
    manifest = prepare_shards(config_of(tmp_path, "bytes", begin_token))
    tail = manifest.splits["validation"].tokens - 1
    whole = len(("Größe abc" * 400).encode())
    assert sum(split.text_bytes for split in manifest.splits.values()) == whole
    assert abs(manifest.splits["validation"].text_bytes - tail) <= 1  # its share
    assert manifest.splits["train"].tokens == whole - tail + (begin_token != "none")
    mixture = Mixture([MixturePart("one", tmp_path, 1.0, manifest)])
    per_token = manifest.splits["train"].tokens / manifest.splits["train"].text_bytes
    found = mixture.bits_per_byte("train", 1.0, [1.0])
    assert found == pytest.approx(per_token / np.log(2), rel=1e-12)


def test_a_corpus_of_borders_alone_has_no_text(tmp_path):
    KINDS["WordPiece"]().save(str(tmp_path / "tokenizer.json"))
    write_texts(tmp_path, ["\u200b"])
    with pytest.raises(UserError, match="the corpus has no text"):
        prepare_shards(config_of(tmp_path, tmp_path, "the"))


def test_shards_of_another_begin_token_are_a_mistake(tmp_path):
    write_tokenizer(tmp_path)
    write_texts(tmp_path)
    begun = config_of(tmp_path, tmp_path, "auto")
    prepare_shards(begun)
    prepare_shards(config_of(tmp_path, tmp_path, "<s>"))  # the same one
    message = "prepared with data.begin_token = 1, now it is null: set it back"
    with pytest.raises(UserError, match=message):
        prepare_shards(config_of(tmp_path, tmp_path, "none"))
    plain = config_of(tmp_path, tmp_path, "none", path=str(tmp_path / "plain"))
    prepare_shards(plain)
    with pytest.raises(UserError, match="data.begin_token = null, now it is 1"):
        prepare_shards(config_of(tmp_path, tmp_path, "auto", path=str(tmp_path / "plain")))


def test_a_folder_that_was_begun_keeps_its_begin_token(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("a fox\n" * 50)
    monkeypatch.setattr(corpus, "PIECE", 100)
    plain = config_of(tmp_path, "bytes", "none", files=[str(tmp_path / "texts")])
    assert prepare_shards(plain, 0, 3) is None
    other = config_of(tmp_path, "bytes", "a", files=[str(tmp_path / "texts")])
    with pytest.raises(UserError, match="with data.begin_token = null, now it is 97"):
        prepare_shards(other, 1, 3)
    assert prepare_shards(plain, 1, 3) is None
    assert prepare_shards(plain, 2, 3).begin_token is None


def test_a_border_is_an_end_and_the_begin_token_after_it():
    tokens = np.array([[5, 1, 9, 5, 9, 1], [1, 9, 5, 1, 1, 5], [5, 5, 1, 9, 1, 5]])
    expected = [
        [place for place in range(1, 6) if (row[place - 1], row[place]) == (5, 1)]
        for row in tokens.tolist()
    ]
    assert [np.flatnonzero(row).tolist() for row in begins(tokens, 5, 1)] == expected
    assert (begins(tokens, 5) == (tokens == 5)).all()


@pytest.mark.parametrize("begin_token", ["<s>", "▁The"])  # one that texts have too
@pytest.mark.parametrize("chunk", [2**24, 7])
def test_packed_documents_begin_with_it(begin_token, chunk, tmp_path, monkeypatch):
    theirs = write_tokenizer(tmp_path)
    write_texts(tmp_path)
    config = config_of(tmp_path, tmp_path, begin_token, validation_fraction=0.3)
    monkeypatch.setattr(corpus, "PIECE", 500)
    manifest = prepare_shards(config)
    monkeypatch.setattr(packing, "CHUNK", chunk)
    pack_shards(tmp_path / "shards", manifest, 48)
    split, begin = manifest.splits["train"], manifest.begin_token
    windows = PackedWindows(tmp_path / "shards", split, manifest.dtype, 48)
    expected = []
    for shard in split.shards:
        tokens = np.fromfile(tmp_path / "shards" / shard.file, "<u2").astype(int)
        places = [n for n in range(1, len(tokens)) if (tokens[n - 1], tokens[n]) == (2, begin)]
        for spans in best_fit_windows(np.array(places), len(tokens), 48):
            inside = [list(range(first, first + size)) for first, size in spans]
            assert all(first in places for first, _ in spans[1:])
            expected.append(tokens[sum(inside, []) + [inside[-1][-1] + 1]].tolist())
    windows = [windows[number] for number in range(len(windows))]
    assert [window.tolist() for window in windows] == expected
    assert len(split.shards) > 1 and len(expected) > 10
    # No document is an end of text alone, but for one that the beginning of a window cut.
    alone = {tuple([begin, *theirs(text).input_ids[1:], 2]) for text in TEXTS}
    alone |= {tuple([begin, *theirs(text + "\n").input_ids[1:], 2]) for text in TEXTS}
    whole = 0
    for window in windows:
        inputs = window[:-1]
        starts = np.flatnonzero(begins(inputs, 2, begin)).tolist()
        for first, end in zip(starts, starts[1:]):
            assert tuple(inputs[first:end].tolist()) in alone
            whole += 1
    assert whole > 10
