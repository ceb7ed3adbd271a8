"""`torchmars config`: each value with where it is from, and what a run has otherwise."""

import re

import pytest

from torchmars.config.load import config_text, load_config


@pytest.fixture
def printed(call):
    """Runs the command on a config and options; returns the lines it prints, by setting."""

    def run(*args):
        code, out, err = call("config", *args)
        assert code == 0, err
        lines = (re.split("  +", line, maxsplit=1) for line in out.splitlines())
        return {line.partition(" = ")[0]: (line, where) for line, where in lines}

    return run


def test_each_value_has_where_it_is_from_and_reads_back(printed, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'training.steps = 4\ndata.mixture = [{source = "text:a, ]*", weight = 2}]\n'
        'evaluation.tasks = ["a, ]", "b"]\n'
    )
    options = ("--optimizer.betas", "0.8,0.9")
    lines = printed(file, *options)
    assert lines["training.steps"] == ("training.steps = 4", f"# in {file}")
    assert lines["optimizer.betas"] == ("optimizer.betas = [0.8, 0.9]", "# on the command line")
    assert lines["evaluation.tasks"][0] == 'evaluation.tasks = ["a, ]", "b"]'
    assert lines["run.plugins"][0] == "run.plugins = []"
    assert lines["training.z_loss"] == ("training.z_loss = 0.0", "# default")
    assert lines["optimizer.gamma"] == ("optimizer.gamma = 0.025", "# default")
    assert lines["optimizer.lr_1d"] == ("optimizer.lr_1d = 0.003", "# follows from others")
    again = tmp_path / "again.toml"
    again.write_text("\n".join(map("  ".join, lines.values())))
    assert load_config([str(again)], "test") == load_config([str(file), *options], "test")


def test_what_a_run_has_otherwise(printed, config, tmp_path):
    of_run = ["--training.steps", "1", "--validation.interval", "0"]
    (tmp_path / "config.toml").write_text(config_text(load_config([str(config), *of_run], "test")))
    lines = printed(config, "--diff", tmp_path, "--optimizer.gamma", "0.5")
    assert {name: change for name, (_, change) in lines.items()} == {
        "training.steps": "1 -> 4",
        "validation.interval": "0 -> 2",
        "optimizer.gamma": "0.025 -> 0.5",
    }


def test_what_a_run_has_derived_itself_is_no_difference(call, config, tmp_path):
    """Only a config that says otherwise differs."""
    derived = {
        "--training.dtype": "bfloat16",
        "--training.compile": "true",
        "--optimizer.matrix_dtype": "bfloat16",
        "--checkpoint.init_from": "hf:some/model@0a1b2c",
    }
    words = [word for pair in derived.items() for word in pair]
    (tmp_path / "config.toml").write_text(config_text(load_config([str(config), *words], "test")))
    args = ["config", config, "--training.dtype", "auto", "--diff", tmp_path]
    assert call(*args, "--checkpoint.init_from", "hf:some/model")[1] == "nothing differs\n"
    others = ["--training.compile", "false", "--optimizer.matrix_dtype", "float32"]
    found = call(*args, *others, "--checkpoint.init_from", "hf:some/mode")[1]
    assert found.splitlines() == [
        "training.compile        true -> false",
        'optimizer.matrix_dtype  "bfloat16" -> "float32"',
        'checkpoint.init_from    "hf:some/model@0a1b2c" -> "hf:some/mode"',
    ]
