"""What a run says at its start."""

import tomllib
from pathlib import Path

import pytest
import torch

from torchmars.training.summary import TESTED, torch_warning


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1+cu130", torch.__version__])
def test_a_torch_that_was_tested_needs_no_word(version):
    assert torch_warning(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0a0+git1", "2.9"])
def test_a_torch_that_was_not_tested_is_named_in_a_line(version):
    said = f"torch {version}: torchmars was tested with torch 2.11 to 2.13"
    assert torch_warning(version) == said


def test_a_new_environment_gets_a_torch_that_was_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [torch_range] = [each for each in project["dependencies"] if each.startswith("torch>")]
    major, minor = TESTED[1].split(".")
    assert torch_range == f"torch>={TESTED[0]},<{major}.{int(minor) + 1}"
