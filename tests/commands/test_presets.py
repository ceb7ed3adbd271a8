"""torchmars presets."""

import subprocess
import sys

import pytest

from torchmars.commands.presets import main
from torchmars.config.presets import read_presets
from torchmars.planning.plan import FLOPS
from torchmars.planning.preset_pages import HEADINGS, preset_page, preset_table, read_preset

PRESETS = read_presets()


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


def test_hours_of_gpt2_small_by_hand():
    """Matrices of 12 blocks, 12 x 768^2 each, and the head; attention over 1024 tokens."""
    per_token = 6 * (12 * 12 * 768**2 + 50_304 * 768) + 12 * 12 * 768 * 1024
    hours = 100_000 * 480 * 1024 * per_token / (8 * FLOPS) / 3600  # traffic hides behind it
    config, model, seconds = read_preset(PRESETS["gpt2-small-adamw-openwebtext"])
    assert 100_000 * seconds / 3600 == pytest.approx(hours) == pytest.approx(3.6465, rel=1e-4)
    assert config.training.tokens == 49_152_000_000
    assert model.parameter_count == 12 * 12 * 768**2 + (50_304 + 1024) * 768 + 25 * 768
    *_, exact = read_preset(PRESETS["gpt2-small-mars-adamw-exact-openwebtext"])
    assert exact == pytest.approx(2 * seconds)


def test_table():
    chosen = ["gpt2-small-adamw-openwebtext", "llama-8b-adamw-fineweb-edu"]
    heading, small, llama, *more = preset_table(PRESETS[name] for name in chosen)
    assert [heading.index(name) for name in HEADINGS] == sorted(map(heading.index, HEADINGS))
    assert small.split() == [chosen[0], "124M", "49.2B", "8", "4", "published"] + [
        *("validation", "loss", "2.885")
    ]
    assert llama.split()[:4] == [chosen[1], "8.03B", "15T", "64*"] and "partly" in llama
    assert "our assumption" in more[0] and "400 TFLOP/s" in more[-1]


def test_page():
    lines = preset_page(PRESETS["gpt2-xl-muon-fineweb-edu"])
    page = "\n".join(lines)
    for text in (
        "files     gpt2_xl.toml optimizers/muon.toml data/fineweb_edu.toml",
        "lr 0.003, betas 0.95 0.99, betas_1d 0.9 0.95, weight_decay 0.1",
        "schedule  cosine, 2,000 steps of warmup, min_lr 1e-05",
        "published: arXiv 2510.21800",
        "result    none published",
        "8 GPUs, 12 x 5 sequences each",
        "here 12 x 5 sequences",
        "We follow MARS_M/README.md",
        "CONFIG_FILE=gpt2-xl-muon-fineweb-edu ./run_train.sh",
    ):
        assert text in page


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("fineweb-edu")])
def test_every_preset_has_a_plan_that_fits(name):
    """Of each size and rule: the data makes no difference."""
    args = ["plan", name, "--world-size", str(PRESETS[name].about.gpus)]
    command = [sys.executable, "-m", "torchmars", *args]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    print(said.stdout)
    assert "does not fit" not in said.stdout
