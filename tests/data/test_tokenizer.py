"""Tokens of known texts, and round trips."""

import json
import shutil

import pytest
import tiktoken
import tokenizers

from tests.support.real_data import FOLDER, needs_data
from tests.support.tiny import tiny_config, write_text
from tests.support.tokenizers import llama_2, tokenizer_file
from torchmars.config import DataConfig
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.data import corpus
from torchmars.data.documents import Encoder
from torchmars.data.prepare import prepare_shards
from torchmars.data.tokenizer import (
    ByteTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
)
from torchmars.data.windows import Windows
from torchmars.training.preparation import prepare_data


def test_bytes():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("aé\n")
    assert tokens.tolist() == [97, 195, 169, 10]
    assert tokenizer.decode(tokens.tolist() + [256, 300]) == "aé\n"


@needs_data("tiktoken_cache")
def test_gpt2_known_ids(tmp_path, monkeypatch):
    shutil.copytree(
        FOLDER / "tiktoken_cache", tmp_path / "bpe"
    )  # tiktoken may delete from its cache
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))
    tokenizer = TiktokenTokenizer("gpt2")
    texts = ["Hello world", "Hello, world!", "The quick brown fox jumps over the lazy dog"]
    assert [tokens.tolist() for tokens in map(tokenizer.encode, texts)] == [
        [15496, 995],
        [15496, 11, 995, 0],
        [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
    ]
    assert [tokenizer.decode(tokens.tolist()) for tokens in map(tokenizer.encode, texts)] == texts
    assert 50256 not in tokenizer.encode("<|endoftext|>")


def test_gpt2_without_its_files_says_what_to_do(tmp_path, monkeypatch):
    def unreachable(name):
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        TiktokenTokenizer("gpt2").encode("a")


def test_a_file_of_hugging_face(tmp_path):
    file = tokenizer_file(tmp_path / "mine")
    for name in (str(file), str(file.parent)):
        tokenizer = load_tokenizer(name)
        assert (tokenizer.name, tokenizer.vocab_size) == (name, 128)
        assert tokenizer.end_of_text == 127
        texts = ["a fox", "over <|endoftext|> the hill"]
        found = [*map(tokenizer.encode, texts)]
        assert [tokens.tolist() for tokens in found] == [[ord(c) for c in text] for text in texts]
        assert [tokenizer.decode(tokens.tolist()) for tokens in found] == texts
        assert tokenizer.decode([97, 127, 98, 200_000]) == "ab"


def test_a_file_with_dropout_gives_the_same_tokens_each_time_and_says_so_once(tmp_path, capsys):
    file = tmp_path / "tokenizer.json"
    llama_2().save(str(file))
    expected = load_tokenizer(str(file)).encode("The cat sat on")
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.5
    file.write_text(json.dumps(content))
    for _ in range(9):
        found = load_tokenizer(str(file)).encode("The cat sat on")
        assert found.tolist() == expected.tolist()
    said = f"data.tokenizer: texts are encoded without the dropout of {file}\n"
    assert capsys.readouterr().err == said


def test_the_end_of_text_is_the_one_that_the_config_beside_the_file_names(tmp_path):
    file = tokenizer_file(tmp_path, special="<stop>")
    with pytest.raises(UserError, match="has none of the tokens that end a text .*eos_token"):
        load_tokenizer(str(file)).end_of_text  # noqa: B018
    config = file.with_name("tokenizer_config.json")
    for eos in ("<stop>", {"content": "<stop>", "lstrip": False}):
        config.write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(file)).end_of_text == 127
    config.write_text('{"eos_token": "<other>"}')
    with pytest.raises(UserError, match="none of the tokens that end a text .<other>."):
        load_tokenizer(str(file)).end_of_text  # noqa: B018
    config.write_text("{")
    with pytest.raises(UserError, match="cannot read .*tokenizer_config.json"):
        load_tokenizer(str(file)).end_of_text  # noqa: B018


def test_a_large_vocabulary_has_tokens_of_32_bits_and_another_file_is_refused(tmp_path):
    file = tokenizer_file(tmp_path / "large", letter_id=lambda letter: 1000 * ord(letter))
    write_text(tmp_path)
    config = tiny_config(tmp_path, data={"tokenizer": str(file)})
    [part] = prepare_data(config).parts
    manifest = part.manifest
    split = manifest.splits["train"]
    assert manifest.dtype == "uint32"
    assert manifest.vocab_size == split.max_token + 1 == 126_002
    window = Windows(part.folder, split, manifest.dtype, 32)[0].tolist()
    document = (tmp_path / "text.txt").read_text()[:33]
    assert window == [1000 * ord(letter) for letter in document]
    prepare_data(config)
    tokenizer_file(tmp_path / "large", letter_id=lambda letter: 1001 * ord(letter))
    with pytest.raises(
        UserError, match="prepared with data.tokenizer = .* of SHA-256 .*, now it is"
    ):
        prepare_data(config)


def test_what_is_begun_goes_on_with_the_same_file_under_another_path_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 10)
    write_text(tmp_path)
    files = [tokenizer_file(tmp_path / name) for name in ("one", "two")]
    files.append(tokenizer_file(tmp_path / "three", letter_id=lambda letter: ord(letter) ^ 1))

    (tmp_path / "more.txt").write_text("a fox")

    def begin(file):
        files = [str(tmp_path / name) for name in ("text.txt", "more.txt")]
        config = tiny_config(tmp_path, data={"tokenizer": str(file), "files": files}).data
        assert prepare_shards(config, 1, 2) is None

    begin(files[0])
    begin(files[1])
    with pytest.raises(UserError, match='begun with data.tokenizer = "a file of SHA-256 .*, now'):
        begin(files[2])


@pytest.mark.parametrize(
    "name,message",
    [
        ("gpt3", "none called 'gpt3': did you mean gpt2. It is one of bytes, gpt2, .*o200k_base"),
        ("cl100k", "did you mean cl100k_base"),
        ("", "none called ''"),
        ("no/such/folder", "cannot read no/such/folder: No such file"),
        (".", "cannot read tokenizer.json: No such file"),
        ("x.json", "x.json is no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_told(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=message) as mistake:
        load_tokenizer(name).vocab_size  # noqa: B018
    assert "\n" not in str(mistake.value)


def damaged(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


GIVES_UP = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"pre_tokenizer": GIVES_UP | {"invert": False}}, "cannot encode a text .*retry-limit"),
        ({"normalizer": {"type": "Precompiled"}}, "is no tokenizer.json"),
        (
            {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}},
            "cannot encode a text .*`unk_id` is missing",
        ),
    ],
)
def test_a_file_that_gives_up_is_one_line(tmp_path, changes, message):
    file = tokenizer_file(tmp_path)
    damaged(file, **changes)
    write_text(tmp_path)
    with pytest.raises(UserError, match=f"data.tokenizer: .*{message}") as mistake:
        load_tokenizer(str(file)).vocab_size  # noqa: B018
        load_tokenizer(str(file)).encode("x" * 3000 + " é")
    assert "\n" not in str(mistake.value)


NASTY = [
    "",
    " \t\n",
    "a" * 30_000,
    "!" * 30_000,
    "ab " * 10_000,
    "\n" * 30_000 + "x",
    " " * 30_000,
    "\u3000" * 30_000 + "x",
    "7" * 30_000,
    "\0",
    "a\0b\0",
    "\u0301" * 3_000,
    "e" + "\u0301\u0323" * 500,
    "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 300,
    "\U0001f1e9\U0001f1ea" * 300,
    "".join(map(chr, range(32))) + "\x7f\x80\x85\x9f",
    "a\u2028b\u2029c\x0cd\x0be\u0085f",
    "\ufeff\ufffe\uffff\U0010ffff",
    "<|endoftext|> and <|endoftext|><|endoftext|>",
    "\u1e9b\u0323 \ufb01 \u212b \u00e9",
]
HALVES = ["\ud800", "a\udfffb", "\ude00\ud83d"]
# Of more white space before something else than tiktoken's regular expression can take back.
TOO_LONG = ["x" + " " * 1_200_000 + "y", "\n" * 1_200_000 + "y <|endoftext|>"]


def encoded(name, texts, damaged=0):
    """The tokens of documents, in which so many are damaged, as a preparation makes them."""
    encoder = Encoder(
        DataConfig(tokenizer=name, validation_fraction=1e-12),
        parse_source("parquet:a"),
        corpus.LONGEST,
    )
    tokens, done = encoder.encode([("a.parquet", "row", *each) for each in enumerate(texts, 1)])
    assert len(done.damaged) == damaged and not len(tokens["validation"])
    return tokens["train"].tolist(), [each.reason for each in done.damaged]


def joined(encode, end):
    return [token for text in NASTY if text.strip() for token in [*encode(text), end]]


@needs_data("tiktoken_cache")
def test_nasty_documents_have_tiktokens_tokens_or_are_damaged(tmp_path, monkeypatch):
    shutil.copytree(FOLDER / "tiktoken_cache", tmp_path / "bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))
    expected = joined(tiktoken.get_encoding("gpt2").encode_ordinary, 50256)
    texts = [*TOO_LONG[:1], *NASTY[:9], *HALVES, *TOO_LONG[1:], *NASTY[9:]]
    tokens, reasons = encoded("gpt2", texts, damaged=5)
    assert tokens == expected
    assert all("surrogates not allowed" in each for each in reasons[1:4])
    assert all("gpt2 cannot encode a text" in reasons[number] for number in (0, 4))


def test_a_document_that_a_file_of_hugging_face_gives_up_on_is_left_out(tmp_path):
    file = tokenizer_file(tmp_path)
    damaged(file, pre_tokenizer=GIVES_UP | {"invert": False})
    tokens, [reason] = encoded(str(file), ["a", "x" * 3000, "bc"], damaged=1)
    mine = tokenizers.Tokenizer.from_file(str(file))
    mine.no_padding(), mine.no_truncation()
    assert tokens == [*mine.encode("a").ids, 127, *mine.encode("bc").ids, 127]
    assert f"{file} cannot encode a text" in reason and "retry-limit" in reason


def test_half_of_a_surrogate_pair_in_a_prompt_is_one_line():
    with pytest.raises(UserError, match="bytes cannot encode a text .*surrogates not allowed"):
        load_tokenizer("bytes").encode("a\ud800")


def test_another_encoding_of_tiktoken_by_its_name(tmp_path, monkeypatch):
    """One whose end of text is not its last id, as in p50k_base, and with ids of no text."""
    ranks = {bytes([code]): code for code in range(256)} | {b"  ": 300}
    encoding = tiktoken.Encoding(
        "p50k_base",
        pat_str=r"\s+|\S+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 256, "<|end|>": 70_000},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"p50k_base": encoding}.get)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p50k_base").mkdir()  # the name comes first
    tokenizer = load_tokenizer("p50k_base")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (70_001, 256)
    text = "a  <|endoftext|>"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == "uint32" and 300 in tokens and 256 not in tokens
    assert tokenizer.decode([*tokens.tolist(), 256, 280, 70_000, 80_000]) == text


@needs_data("tiktoken_cache", "tinyshakespeare")
def test_gpt2_as_a_file_of_hugging_face_is_tiktokens(tmp_path, monkeypatch):
    shutil.copytree(FOLDER / "tiktoken_cache", tmp_path / "bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))
    files = {file.read_bytes()[:1] == b"{": str(file) for file in (tmp_path / "bpe").iterdir()}
    gpt2 = tokenizers.ByteLevelBPETokenizer(files[True], files[False])
    gpt2.add_special_tokens(["<|endoftext|>"])
    gpt2.save(str(tmp_path / "tokenizer.json"))
    texts = (FOLDER / "tinyshakespeare" / "input.txt").read_text()[:100_000].split("\n\n")
    texts += ["é—\u4e2d <|endoftext|>  x"]
    ours, theirs = load_tokenizer(str(tmp_path)), load_tokenizer("gpt2")
    assert (ours.vocab_size, ours.end_of_text) == (theirs.vocab_size, theirs.end_of_text)
    for mine, tiktokens in zip(map(ours.encode, texts), map(theirs.encode, texts)):
        assert mine.tolist() == tiktokens.tolist() and mine.dtype == tiktokens.dtype
        assert ours.decode(mine.tolist()) == theirs.decode(mine.tolist())
