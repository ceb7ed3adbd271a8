"""The README's code runs as printed, and its config is one."""

import re
from pathlib import Path

import pytest
import torch

from torchmars.config.load import load_config

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, capsys):
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) < 1.0  # the loss fell from log(100)


@pytest.mark.parametrize("toml", blocks("toml"))
def test_config_is_valid(toml, tmp_path):
    (tmp_path / "my.toml").write_text(toml)
    config = load_config([str(tmp_path / "my.toml")], "test")
    assert config.run.name == "books" or config.optimizer.groups[0].split == 3


def test_quickstart_is_the_documented_one():
    config = load_config(
        [str(Path(__file__).parents[2] / "train_configs" / "quickstart.toml")], "test"
    )
    assert (
        config.optimizer.name == "mars-adamw" and f"step   1/{config.training.steps} | loss" in TEXT
    )
