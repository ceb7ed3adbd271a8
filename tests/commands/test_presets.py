"""torchmars presets."""

import sys

import pytest

from torchmars.commands.presets import main
from torchmars.config.presets import read_presets


def printed(monkeypatch, capsys, *args):
    """What `torchmars presets ARGS` prints."""
    monkeypatch.setattr(sys, "argv", ["torchmars presets", *args])
    main()
    return capsys.readouterr().out.splitlines()


def test_all_and_those_of_a_family(monkeypatch, capsys):
    names = [line.split()[0] for line in printed(monkeypatch, capsys)]
    assert names[1 : 1 + len(read_presets())] == list(read_presets())
    family = [line.split()[0] for line in printed(monkeypatch, capsys, "--family", "llama")]
    assert [name for name in family if name.count("-") > 2] == [
        name for name in read_presets() if name.startswith("llama")
    ]


def test_one(monkeypatch, capsys):
    lines = printed(monkeypatch, capsys, "gpt2-medium-mars-m-fineweb-edu")
    assert lines[0] == "preset    gpt2-medium-mars-m-fineweb-edu"


@pytest.mark.parametrize(
    "args,error",
    [
        (
            ["gpt2-medium-mars"],
            "there is no preset gpt2-medium-mars: did you mean gpt2-medium-mars",
        ),
        (["--family", "gpt3"], "--family must be one of gpt2, llama, qwen3, got gpt3"),
    ],
)
def test_mistakes(monkeypatch, capsys, args, error):
    monkeypatch.setattr(sys, "argv", ["torchmars presets", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and err.startswith(f"error: {error}")
