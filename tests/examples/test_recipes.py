"""The recipes learn, on one rank or on two, and docs/own_loops.md shows them as they are."""

import os
import re

import pytest

from tests.docs.pages import ROOT, named_files
from tests.support.commands import Command

FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
# .ci/frameworks runs these in an environment that has their packages.
ELSEWHERE = {"with_lightning", "with_timm", "with_torchtitan"}
HERE = {"own_loop": 1, "ddp": 2, "fsdp2": 2, "with_accelerate": 2, "with_trainer": 1}


@pytest.mark.parametrize("name,ranks", HERE.items())
def test_a_recipe_learns(name, ranks, tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    options = ["--standalone", "--nproc-per-node", str(ranks), str(FOLDER / f"{name}.py")]
    command = Command("torchrun", options, tmp_path, env, ranks)
    out, err = command.communicate()
    assert command.returncode == 0, err
    losses = [float(each) for each in re.findall(r"loss (\d[\d.]*(?:e-\d+)?)", out)]
    assert losses and max(losses) < 1.0  # it fell from log(100) or log(64)


def test_all_recipes_are_run():
    script = (ROOT / ".ci" / "frameworks").read_text()
    assert {file.stem for file in RECIPES} == {*HERE, *ELSEWHERE}
    assert all(name.removeprefix("with_") in script for name in ELSEWHERE)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_page_shows_the_recipe(file):
    text = file.read_text()
    assert named_files("python")[file.name] == f"# {file.name}\n{text}"
    imports = ("import ", "from ")
    own = [line for line in text.splitlines() if line and not line.startswith(imports)]
    if file.stem not in ELSEWHERE:
        assert len(own) <= 15
