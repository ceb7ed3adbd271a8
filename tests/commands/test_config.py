"""`torchmars config`: each value with where it is from."""

import re

import pytest

from torchmars.config.load import load_config


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
