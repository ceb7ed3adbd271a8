"""The tokenizer of an export as AutoTokenizer of transformers loads it, for each kind of model."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.exchange.test_folder import MIXTURES, MODELS
from tests.exchange.test_tokenizer_files import TEXTS
from tests.support.tiny import tiny_config
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.families import to_config
from torchmars.exchange.tokenizer_files import tokenizer_files
from torchmars.models import build_meta_model

transformers = pytest.importorskip("transformers")
KINDS = MODELS | MIXTURES
LETTERS = pre_tokenizers.ByteLevel.alphabet()


def pairs(folder):
    """A tokenizer file that cuts by threes, and has all pairs of two such letters."""
    vocabulary = {letter: number for number, letter in enumerate(["<|endoftext|>", *LETTERS])}
    merges = [(one, two) for one in "etaoĠ" for two in "etaoĠ1"]
    vocabulary |= {one + two: len(vocabulary) + n for n, (one, two) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    cut = pre_tokenizers.Split(tokenizers.Regex(".{1,3}"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


def qwen(folder):
    """A tokenizer file that Qwen2's own class wrote."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    vocabulary |= {"et": 256, "eta": 257}
    theirs = transformers.Qwen2Tokenizer(vocabulary, [("e", "t"), ("et", "a")])
    theirs.save_pretrained(folder)
    return load_tokenizer(str(folder))


def ids(tokenizer):
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.parametrize("make", [lambda folder: load_tokenizer("bytes"), pairs, qwen])
@pytest.mark.parametrize("name", KINDS)
def test_it_gives_the_same_tokens_but_for_a_qwen2(tmp_path, name, make):
    tokenizer = make(tmp_path)
    config = tiny_config(tmp_path, model=KINDS[name])
    theirs = to_config(build_meta_model(config.model, tokenizer.vocab_size, 64))
    folder = tmp_path / "export"
    folder.mkdir()
    for file, text in tokenizer_files(tokenizer, 64).items():
        (folder / file).write_text(text)
    (folder / "config.json").write_text(json.dumps(theirs))
    expected = [tokens.tolist() for tokens in map(tokenizer.encode, TEXTS)]
    assert ids(transformers.PreTrainedTokenizerFast.from_pretrained(folder)) == expected
    apart = ids(transformers.AutoTokenizer.from_pretrained(folder)) != expected
    assert apart == (name == "qwen2" and make is not qwen)  # which the command tells
