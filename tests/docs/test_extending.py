"""The plugins of docs/extending.md train as the page says, and only where the user names them."""

import csv
import json
import math
import os

import pytest
import tomli_w

import torchmars
from tests.docs.pages import ROOT, blocks, commands, named_files
from tests.support.commands import Command
from tests.support.tiny import tiny_tables, write_text
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError

PAGE = [block for block in blocks("bash") if block.page.name == "extending.md"]
REVIEWS = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the page's files, and a small quickstart.toml, which goes before the real one.

    Every command of torchmars on the page has been run there: (exit code, output, errors) by its
    arguments.
    """
    folder = tmp_path_factory.mktemp("extending")
    for name, text in named_files("python").items():
        (folder / name).write_text(text)
    write_text(folder)
    tables = tiny_tables(folder, training={"steps": 3, "global_batch_size": 16, "seq_len": 32})
    for key in ("files", "path", "validation_fraction"):
        del tables["data"][key]
    tables["data"]["source"] = f"text:{folder}/text.txt"
    tables["run"] = {"folder": "runs"}
    (folder / "quickstart.toml").write_text(tomli_w.dumps(tables))
    (folder / "reviews").mkdir()
    with open(folder / "reviews" / "all.csv", "w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["stars", "text"])
        for number in range(REVIEWS):
            rows.writerow([number % 5, f"Review {number}:\nit was, well, so"])
        rows.writerow([3])  # no text
    done = {}
    for block in PAGE:
        for command in commands(block):
            if command.words[0] == "torchmars":  # not those of images
                done[" ".join(command.words[1:])] = run(folder, *command.words[1:])
    return folder, done


def run(folder, command, *args):
    """Run a command in a folder, with one rank; its exit code, output, errors."""
    env = os.environ | {"NGPU": "1", "OMP_NUM_THREADS": "1", "RDZV_TIMEOUT": "300"}
    process = Command(command, [*args], folder, env, ranks=1)
    out, err = process.communicate()
    return process.returncode, out, err


def test_every_command_of_the_page_ends_well(place):
    _, done = place
    assert len(done) == 7
    for command, (code, _, err) in done.items():
        assert code == 0, f"{command}: {err}"
        assert "warning" not in err or "csv" in command, err


def test_the_model_the_rule_and_the_documents_are_the_plugins_own(place):
    folder, done = place
    trained = {name.split()[3]: out for name, (_, out, _) in done.items() if name[:5] == "train"}
    model, rule, data = (trained[f"my_{kind}"] for kind in ("model", "rule", "data"))
    assert "model     parallel nano" in model and "signum" in rule
    assert "torchmars generate runs/parallel --plugins my_model" in model
    assert (
        "torchmars export runs/parallel runs/parallel-weights --to safetensors --plugins my_model\n"
        in model
    )
    hooked = trained["my_hook"]  # the model is the package's own
    assert "torchmars export runs/watched runs/watched-hf --plugins my_hook\n" in hooked
    assert "csv" in data
    lines = (folder / "runs/tracked/losses.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    [manifest] = (folder / "runs/parallel/checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["run"]["plugins"] == ["my_model"]


def test_a_hook_is_called_after_each_step_before_it_is_saved(place):
    folder, done = place
    [out] = [out for words, (_, out, _) in done.items() if "my_hook" in words]
    lines = [line.split()[0] for line in out.splitlines()]
    assert lines.count("weights") == 3 and f"weights after 3 steps: {norm_of(folder):.3f}" in out
    assert lines.index("checkpoint") > len(lines) - 1 - lines[::-1].index("weights")


def norm_of(folder):
    """The norm of the weights of the run's last checkpoint, in float64."""
    weights = torchmars.load(folder / "runs/watched").model.parameters()
    return math.sqrt(sum(float(each.detach().double().square().sum()) for each in weights))


def test_settings_of_its_own_reach_the_plugin(place):
    folder, _ = place
    words = "plan quickstart.toml --world-size 1 --plugins my_model,my_rule".split()
    words += "--model.name parallel --optimizer.name signum".split()
    words += ["--optimizer.threshold", "0.5"]
    assert run(folder, *words, "--model.mlp_scale", "0.5")[0] == 0
    _, text, _ = run(folder, *words, "--help", "all")
    assert "--model.mlp_scale FLOAT" in text and "--optimizer.threshold FLOAT" in text
    for section, setting in (("model", "mlp_scale"), ("optimizer", "threshold")):
        _, text, _ = run(folder, *words[:8], "--help", section, *words[8:])
        assert f"[{section}]:" in text and f"--{section}.{setting} FLOAT" in text
    words[0] = "train"
    assert words[2:4] == ["--world-size", "1"]
    del words[2:4]
    words += ["--run.name", "parallel"]  # which had no such setting
    code, _, err = run(folder, *words, "--model.mlp_scale", "0.5")
    assert code == 2 and "was made with model.mlp_scale = 1.0, the config says 0.5" in err


@pytest.mark.slow
def test_layouts_of_a_plugins_model_are_planned(place):
    """In processes of their own, which import it too."""
    folder, _ = place
    words = "plan quickstart.toml --world-size 1 --plugins my_model --model.name parallel".split()
    code, out, err = run(folder, *words, "--find")
    assert code == 0 and "the fastest that fits" in out, err


def test_another_rule_drops_the_plugins_settings(place):
    folder, _ = place
    (folder / "signum.toml").write_text(
        'extends = ["quickstart.toml"]\nrun.plugins = ["my_rule"]\n'
        '[optimizer]\nname = "signum"\nthreshold = 0.5\n'
    )
    code, out, err = run(folder, "plan", "signum.toml", "--world-size", "1")
    assert code == 0 and "signum" in out, err
    words = ["plan", "signum.toml", "--world-size", "1", "--optimizer.name", "adamw"]
    assert run(folder, *words)[0] == 0


@pytest.mark.parametrize("plugins", [5, "abc", [["a"]], ["a; rm -rf ~"], {"a": 1}])
def test_a_hostile_list_of_plugins_is_one_harmless_line(plugins):
    tables = {"run": {"plugins": plugins}, "model": {"name": "theirs"}}
    with pytest.raises(UserError) as found:
        config_from_tables(tables, "theirs")
    assert "\n" not in str(found.value) and "--plugins a" not in str(found.value)


@pytest.mark.parametrize(
    "words",
    [
        "generate runs/parallel",
        "export runs/parallel exported",
        "evaluate runs/parallel --text text.txt",
        "train quickstart.toml --run.name parallel",
        "train quickstart.toml --run.name other --checkpoint.init_from runs/parallel",
    ],
)
def test_a_checkpoint_never_loads_the_plugin_that_it_names(place, words):
    """It ends in one line, and the module was not imported: that would leave a file here."""
    folder, _ = place
    hostile = folder / "my_model.py"
    text = hostile.read_text()
    hostile.write_text(f"open({str(folder / 'imported')!r}, 'w')\n{text}")
    try:
        code, _, err = run(folder, *words.split())
    finally:
        hostile.write_text(text)
    assert code == 2 and not (folder / "imported").exists()
    assert err.count("\n") == 1 and "model" in err and len(err) < 250
    if "train" not in words:
        assert "a plugin's (--plugins), got 'parallel'" in err


def test_a_plugins_model_has_no_export(place):
    folder, _ = place
    code, _, err = run(folder, "export", "runs/parallel", "out", "--plugins", "my_model")
    assert code == 2 and "transformers has no ParallelGPT" in err


def test_the_page_has_a_file_of_each_kind():
    assert {name for name in named_files("python") if name.startswith("my_")} == {
        "my_model.py",
        "my_rule.py",
        "my_data.py",
        "my_tracker.py",
        "my_hook.py",
    }
    for text in named_files("python").values():
        assert text.count("\n") <= 45
    assert (ROOT / "docs" / "extending.md").exists()
