"""Sampling: temperature, the likeliest token, one text per seed, and the command."""

import copy
import random
import sys

import pytest
import torch

from tests.support.tiny import tiny_tables, train, write_text
from tests.support.tokenizers import KINDS, llama_2
from torchmars.commands import generate
from torchmars.config import model_config
from torchmars.data.tokenizer import ByteTokenizer, FileTokenizer
from torchmars.evaluation import sampling
from torchmars.models import build_model


@pytest.mark.parametrize(
    "content,expected",
    [
        ("one\u2028more\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n\nlast", None),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("a\rb\n", ["a\rb"]),
        ("\ufeffone\n\n", ["one", ""]),
        ("\n", [""]),
    ],
)
def test_a_line_of_prompts_ends_at_a_newline_alone(tmp_path, content, expected):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    special = ["one\u2028more\u2029\x85\x0b\x0c\x1c\x1d\x1e", "", "last"]
    assert generate.read_prompts(file) == (expected or special)


def fixed(contexts):
    """Give id 3 the largest logit, then 2, 1 and 0; padding rows get larger ones still."""
    return torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0, 9.0]]).repeat(len(contexts), 1)


def drawn(count=4000, contexts=1, **options):
    draw = sampling.Draw(**options)
    tokens = sampling.sample(fixed, [[0]] * contexts, count, vocab_size=4, draw=draw)
    return torch.tensor(list(tokens)).T.squeeze(0)


def test_frequencies_follow_the_temperature():
    for temperature in (0.5, 1.0, 2.0):
        frequencies = torch.bincount(drawn(temperature=temperature), minlength=4) / 4000
        expected = (torch.arange(4.0) / temperature).softmax(0)
        torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.03)


def test_zero_temperature_and_top_k():
    assert (drawn(20, temperature=0) == 3).all()
    assert set(drawn(500, top_k=2).tolist()) == {2, 3}
    assert set(drawn(500, top_k=99).tolist()) == {0, 1, 2, 3}


def test_seed_decides():
    assert torch.equal(drawn(50, seed=1), drawn(50, seed=1))
    assert not torch.equal(drawn(50, seed=1), drawn(50, seed=2))


def test_the_likeliest_tokens_that_have_a_probability_together():
    """3 and 2 have 0.64 and 0.24, and 1 has 0.09."""
    assert set(drawn(500, top_p=0.5).tolist()) == {3}
    assert set(drawn(500, top_p=0.8).tolist()) == {2, 3}
    assert set(drawn(500, top_p=0.9).tolist()) == {1, 2, 3}
    assert set(drawn(500, top_p=1.0).tolist()) == {0, 1, 2, 3}


def test_each_sequence_is_the_same_whatever_the_others_are():
    batch = drawn(50, contexts=3, seed=4)
    for number in range(3):
        assert torch.equal(batch[number], drawn(50, seed=4 + number))
    assert not torch.equal(batch[0], batch[1])


LETTERS = "h\u00e9!"  # the second one has two bytes


def ends_soon(contexts):
    """Spell a word and end the document."""
    spelled = [*LETTERS.encode(), 256]
    following = dict(zip([ord(" "), *spelled], spelled))
    tokens = torch.tensor([following.get(context[-1], 256) for context in contexts])
    return torch.nn.functional.one_hot(tokens, 320).float() * 100


def test_text_ends_with_its_document_and_comes_in_whole_letters():
    pieces = []
    given = ByteTokenizer(), ["oh "], 50, sampling.Draw()
    assert sampling.continuations(ends_soon, *given, pieces.append) == [LETTERS]
    assert [piece for piece in pieces if piece] == [*LETTERS]
    # It ends where it is told so.
    assert sampling.continuations(ends_soon, *given, lambda piece: "\u00e9" in piece) == [
        LETTERS[:2]
    ]


def test_sequences_of_a_batch_end_apart():
    texts = sampling.continuations(
        ends_soon, ByteTokenizer(), ["oh ", "ox", "h"], 50, sampling.Draw()
    )
    assert texts == [LETTERS, "", LETTERS[1:]]


def spelling(ids):
    """Return predictions of these ids, after contexts of any length."""
    steps = iter(ids)

    def predict(contexts):
        token = next(steps)
        return torch.nn.functional.one_hot(torch.tensor([token] * len(contexts)), 400) * 100.0

    return predict


def decoded(theirs, prompt, ids):
    """Return what the package of the tokenizer decodes beyond the prompt."""
    context = theirs.encode(prompt, add_special_tokens=False).ids
    return theirs.decode([*context, *ids])[len(theirs.decode(context)) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["The", "", "The cat ", "\u00e9", " ", "on fox\u65e5"])
def test_a_continuation_is_what_the_whole_decodes_to_beyond_its_prompt(kind, prompt, tmp_path):
    """Of texts, of letters cut over tokens, and of any tokens, special ones among them."""
    theirs = KINDS[kind]()
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(str(tmp_path))
    texts = (" cat sat on", "cat \u00e9\u65e5 foxes.", "\n\u00e9", "  The\U0001f600")
    encoded = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    chance = random.Random(0)
    ends = tokenizer.end_of_text
    others = [token for token in range(theirs.get_vocab_size()) if token != ends]
    drawn = [[chance.choice(others) for _ in range(12)] for _ in range(12)]
    for ids in [
        *(ids for ids in encoded if ids),
        *(ids[:-1] for ids in encoded if ids[1:]),
        *drawn,
    ]:
        draw = sampling.Draw(temperature=0)
        pieces = []
        given = tokenizer, [prompt], len(ids), draw, pieces.append
        expected = decoded(theirs, prompt, ids)
        assert sampling.continuations(spelling(ids), *given) == [expected]
        if ids in encoded:  # bytes that are no letter change those before them
            assert "".join(pieces) == expected
        both = sampling.continuations(spelling(ids), tokenizer, [prompt, "cat"], len(ids), draw)
        assert both == [expected, decoded(theirs, "cat", ids)]


def test_the_blank_between_prompt_and_continuation_is_there_and_comes_with_its_word(tmp_path):
    llama_2().save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(str(tmp_path))
    ids = [*tokenizer.encode("cat \u00e9 on").tolist(), tokenizer.end_of_text]
    pieces = []
    given = tokenizer, ["The"], 50, sampling.Draw(), pieces.append
    sampling.continuations(spelling(ids), *given)
    assert [piece for piece in pieces if piece] == [" cat", " ", "\u00e9", " on"]


def test_command_line(tmp_path, capsys, monkeypatch):
    write_text(tmp_path)
    train(2, tiny_tables(tmp_path, training={"steps": 30}))

    def command(*args):
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, args)])
        generate.main()
        return capsys.readouterr().out

    run = tmp_path / "runs" / "tiny"
    text = command(run, "--prompt", "The ", "--max_tokens", 20, "--seed", 4)
    assert text.startswith("The ") and len(text) > 5
    assert (
        command(
            run / "checkpoints" / "step-00000030",
            "--prompt",
            "The ",
            "--max_tokens",
            20,
            "--seed",
            4,
        )
        == text
    )
    words = (run, "--prompt", "The ", "--max_tokens", 20)
    assert command(*words, "--seed", 4, "--step", 30) == text
    alone = [command(*words, "--seed", seed) for seed in (4, 5, 6)]
    together = command(*words, "--seed", 4, "--samples", 3)
    assert together == f"{'-' * 15}\n".join(alone) and len({*alone}) == 3
    for args, message in [
        ((tmp_path / "nothing",), "neither a checkpoint nor a run"),
        ((run, "--max_tokens", 0), "--max-tokens must be"),
        ((run, "--temperature", -1), "--temperature must be"),
        ((run, "--step", 29), "has no checkpoint of step 29"),
        ((run, "--temp", 1), "unrecognized arguments: --temp 1: did you mean --temperature?"),
    ]:
        with pytest.raises(SystemExit) as ended:
            command(*args)
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("model", [{}, {"name": "llama", "n_kv_head": 1, "n_inner": 48}])
def test_tokens_are_those_without_a_cache_also_beyond_the_sequence_length(model):
    """The model sees the last 16 tokens, of prompts of several lengths."""
    config = model_config(n_layer=2, n_head=2, n_embd=32, **model)
    one = build_model(config, 257, 16).eval()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(one)
    contexts = [[1, 2, 3], [4], [5] * 12]
    draw = sampling.Draw(temperature=1.0, top_k=50)
    cached = sampling.predict_with_cache(other, 16)
    together = list(sampling.sample(cached, contexts, 30, vocab_size=257, draw=draw))
    for number, context in enumerate(contexts):
        plain = sampling.predict_anew(lambda tokens: one.head(one(tokens)[:, -1]), 16)
        draw = sampling.Draw(temperature=1.0, top_k=50, seed=number)
        alone = list(sampling.sample(plain, [context], 30, vocab_size=257, draw=draw))
        assert [tokens[number] for tokens in together] == [token for (token,) in alone]
