"""Sampling: temperature, the likeliest token, one text per seed, and the command."""

import sys

import pytest
import torch

from tests.support.tiny import tiny_tables, train, write_text
from torchmars.commands import generate
from torchmars.data.tokenizer import ByteTokenizer
from torchmars.training import sampling


def fixed(tokens):
    """Give id 3 the largest logit, then 2, 1 and 0; padding rows get larger ones still."""
    assert tokens.shape[1] <= 8
    return torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0, 9.0]])


def drawn(count=4000, **options):
    return torch.tensor(list(sampling.sample(fixed, 8, [0], count, vocab_size=4, **options)))


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


def ends_soon(tokens):
    """Spell "hi" and end the document."""
    following = {ord("h"): ord("i"), ord("i"): 256}.get(int(tokens[0, -1]), ord("h"))
    return torch.nn.functional.one_hot(torch.tensor([following]), 320).float() * 100


def test_text_ends_with_its_document():
    assert sampling.sample_text(ends_soon, 16, ByteTokenizer(), "oh ", 50) == "oh hi"


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
    for args, message in [
        ((tmp_path / "nothing",), "neither a checkpoint nor a run"),
        ((run, "--max_tokens", 0), "--max_tokens must be"),
        ((run, "--temperature", -1), "--temperature must be"),
    ]:
        with pytest.raises(SystemExit) as ended:
            command(*args)
        assert ended.value.code == 2 and message in capsys.readouterr().err
