"""torchmars presets."""

import subprocess
import sys

import pytest

from torchmars.commands.presets import HEADINGS, main, read_presets

PRESETS = read_presets()


def printed(monkeypatch, capsys, *args):
    """What `torchmars presets ARGS` prints."""
    monkeypatch.setattr(sys, "argv", ["torchmars presets", *args])
    main()
    return capsys.readouterr().out.splitlines()


def test_all_and_those_of_a_family(monkeypatch, capsys):
    heading, *lines = printed(monkeypatch, capsys)
    assert heading.split() == [*HEADINGS] and [line.split()[0] for line in lines] == [*PRESETS]
    first = next(line for line in lines if line.startswith("gpt2-small-adamw-openwebtext "))
    for text in (
        "0.0006",
        "cosine to 3e-05 after 2,000",
        "49.2B",
        "arXiv 2411.10438",
        "loss 2.885",
    ):
        assert text in first
    family = [line.split()[0] for line in printed(monkeypatch, capsys, "--family", "llama")[1:]]
    assert family == [name for name in PRESETS if name.startswith("llama")]


def test_one(monkeypatch, capsys):
    page = "\n".join(printed(monkeypatch, capsys, "gpt2-xl-muon-fineweb-edu"))
    for text in (
        "rate      0.003, cosine to 1e-05 after 2,000 steps, 49.2B tokens",
        "published: arXiv 2510.21800",
        "result    none published",
        "8 GPUs, 12 x 5 sequences each",
        "We follow MARS_M/README.md",
        "torchmars plan gpt2-xl-muon-fineweb-edu --world-size 8",
    ):
        assert text in page


@pytest.mark.parametrize(
    "args,error",
    [
        (
            ["gpt2-medium-mars-m-openweb"],
            "there is no preset gpt2-medium-mars-m-openweb: did you mean gpt2-medium-mars-m-",
        ),
        (["--family", "gpt3"], "--family must be 'gpt2' or 'llama', got 'gpt3'"),
    ],
)
def test_mistakes(monkeypatch, capsys, args, error):
    monkeypatch.setattr(sys, "argv", ["torchmars presets", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and err.startswith(f"error: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("fineweb-edu")])
def test_every_preset_has_a_plan_that_fits(name):
    """Of each size and rule: the data makes no difference."""
    args = ["plan", name, "--world-size", str(PRESETS[name].gpus)]
    command = [sys.executable, "-m", "torchmars", *args]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    print(said.stdout)
    assert "does not fit" not in said.stdout
