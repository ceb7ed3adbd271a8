"""torchmars presets."""

import subprocess
import sys

import pytest

from torchmars.commands.presets import HEADINGS, main, read_presets

PRESETS = read_presets()


def test_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchmars presets"])
    main()
    heading, *lines = capsys.readouterr().out.splitlines()
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
