"""Tokenizer files, against what transformers makes of them: the ids that the tokenizer gives."""

import json
import re
import shutil
import sys

import pytest
import regex
import tiktoken_ext.openai_public
import tokenizers

from tests.support.real_data import FOLDER, needs_data
from tests.support.tokenizers import letters, write_tokenizer
from torchmars.begin import install_command
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.tokenizer_files import (
    byte_pair_tokenizer,
    special_tokens,
    tokenizer_files,
)

TEXTS = [
    "The quick brown fox's 12345 jumps,  over\n\n  the lazy\tdog.  ",
    "naïve — 北京 🙂\r\n\x00 e\u0301 ⅷ²",
    " ",
    "",
]


def written(tokenizer, folder):
    """The tokenizer that transformers makes of the files of `tokenizer`."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    for name, text in tokenizer_files(tokenizer, 128).items():
        (folder / name).write_text(text)
    return transformers.AutoTokenizer.from_pretrained(folder)


def check_same(tokenizer, folder, texts=TEXTS):
    theirs = written(tokenizer, folder)
    for text, tokens in zip(texts, map(tokenizer.encode, texts)):
        assert theirs.encode(text, add_special_tokens=False) == tokens.tolist(), text
        assert theirs.decode(tokens.tolist()) == tokenizer.decode(tokens.tolist())
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_of_text
    assert theirs.model_max_length == 128
    assert theirs.decode([tokenizer.end_of_text], skip_special_tokens=True) == ""


def test_files_of_bytes_give_the_same_ids(tmp_path):
    check_same(load_tokenizer("bytes"), tmp_path / "files")


def begun_tokenizers(folder):
    """Tokenizers whose documents begin with a token, and that token in their files."""
    word_level, llama = folder / "words", folder / "llama"
    word_level.mkdir()
    letters().save(str(word_level / "tokenizer.json"))
    write_tokenizer(llama)
    yield load_tokenizer("bytes", "a"), "a"
    yield load_tokenizer("bytes", " "), "Ġ"
    yield load_tokenizer(str(word_level), " "), " "
    yield load_tokenizer(str(word_level), "$"), "$"
    yield load_tokenizer(str(word_level), ":"), ":"
    yield load_tokenizer(str(llama), "auto"), "<s>"
    yield load_tokenizer(str(llama), "<turn>"), "<turn>"  # its file puts another one there


def test_files_of_a_run_begin_texts_as_its_documents_began(tmp_path):
    for number, (tokenizer, token) in enumerate(begun_tokenizers(tmp_path)):
        theirs = written(tokenizer, tmp_path / str(number))
        assert theirs.bos_token == token and theirs.bos_token_id == tokenizer.begin_token
        for text in ("The cat", "on a fox", ""):
            assert theirs(text).input_ids == [*tokenizer.before, *tokenizer.encode(text)]
        assert special_tokens(tokenizer)["bos_token"] == tokenizer.begin_token


@needs_data("tiktoken_cache")
def test_files_of_gpt2_give_the_same_ids(tmp_path, monkeypatch):
    shutil.copytree(FOLDER / "tiktoken_cache", tmp_path / "bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "bpe"))
    check_same(load_tokenizer("gpt2"), tmp_path / "files")


def test_files_of_a_file_are_that_file_and_the_settings_beside_it_without_code(tmp_path):
    letters(special="</s>").save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": "</s>",
        "pad_token": "</s>",
        "auto_map": {"AutoTokenizer": ["a.B", ""]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    check_same(tokenizer, tmp_path / "files", ["The fox", "a b"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "files" / name).read_text()
        assert (text == (tmp_path / name).read_text()) == (name == "tokenizer.json")
    assert "auto_map" not in text


BEGIN = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False}
BEGIN |= {"normalized": False, "single_word": False}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    "settings,begins,pads",
    [
        ({}, None, "</s>"),
        ({"bos_token": "<s>", "pad_token": "<pad>"}, "<s>", "<pad>"),
        ({"bos_token": BEGIN, "eos_token": "</s>"}, "<s>", "</s>"),
        ({"bos_token": {"content": "<s>"}, "eos_token": None}, "<s>", "</s>"),
        ({"bos_token": None, "pad_token": None}, "none", "none"),
        ({"bos_token": "<gone>", "pad_token": "<gone>"}, None, "</s>"),
    ],
)
def test_the_ids_of_special_tokens_are_those_of_the_files(tmp_path, settings, begins, pads, adds):
    """Where nothing names the one that begins a text, it is what the post-processor puts there."""
    words = ["<s>", "</s>", "<pad>", "a"]
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a")
    file = tokenizers.Tokenizer(model)
    file.add_special_tokens(words[:3])
    if adds:
        file.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    theirs = written(tokenizer, tmp_path / "files")
    found = special_tokens(tokenizer)
    assert found == {name: getattr(theirs, f"{name}_id") for name in found}
    begins = begins or ("<s>" if adds else "</s>")
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == tuple(
        None if each == "none" else each for each in (begins, "</s>", pads)
    )


@pytest.mark.parametrize(
    "generation,config,ends",
    [
        (None, None, []),
        ({"eos_token_id": [1, 3]}, {"eos_token_id": 2}, [1, 3]),
        ({"bos_token_id": 0}, {"eos_token_id": [2, 3]}, [2, 3]),
        (None, {"eos_token_id": 2}, [2]),
    ],
)
def test_what_ends_a_text_by_the_model_beside_the_file_goes_along(
    tmp_path, generation, config, ends
):
    letters(special="</s>").save(str(tmp_path / "tokenizer.json"))
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.copy_to(tmp_path / "copy")
    for each in (tokenizer, load_tokenizer(str(tmp_path / "copy"))):
        assert each.ends_of_model == ends
        assert each.ends == [127, *ends]  # where generation stops
    assert load_tokenizer("bytes").ends == [256]


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_texts_are_cut_as_tiktoken_cuts_them(name, monkeypatch):
    for load in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, load, lambda *_, **__: {})
    pattern = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    monkeypatch.undo()
    cut = byte_pair_tokenizer({b"a": 0}, pattern, {}).pre_tokenizer
    for text in TEXTS:
        spans = [span for _, span in cut.pre_tokenize_str(text)]
        assert spans == [each.span() for each in regex.finditer(pattern, text)]


def test_without_the_package_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=re.escape(install_command("data"))):
        tokenizer_files(load_tokenizer("bytes"), 128)
