"""A step as docs/optimizers.md draws it, and the functions that its five answers name."""

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.docs.pages import ROOT, split_page
from tests.support.ranks import run_ranks
from torchmars.optim import MARS

PAGE = ROOT / "docs" / "optimizers.md"
FOLDER = ROOT / "torchmars" / "optim"
COLLECTIVES = "torch.distributed"


def drawing():
    """Return the lines of the drawing: depth, name and file of each function."""
    blocks, _ = split_page(PAGE)
    [block] = [each for each in blocks if each.text.startswith("MARS.step ")]
    lines = block.text.splitlines()
    return [((len(line) - len(line.lstrip())) // 2, *line.split()[:2]) for line in lines]


def calls_of_a_step(drawn):
    """Return the functions of the drawing that a step calls, in order, with the depth of each."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])) for _ in range(2)
    ]
    rules = ["mars-adamw", "mars-m"]
    groups = [{"params": [each], "rule": rule} for each, rule in zip(parameters, rules)]
    optimizer = MARS(groups, compile=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    names = {(name, file) for _, name, file in drawn}
    calls, stack = [], []

    def watch(frame, event, _):
        code = frame.f_code
        file = Path(code.co_filename)
        place = str(file.relative_to(FOLDER)) if file.is_relative_to(FOLDER) else COLLECTIVES
        if (code.co_qualname, place) not in names:
            return
        if event == "call" and frame not in stack:
            call = len(stack), code.co_qualname, place
            if call not in calls[-1:]:  # a function of several groups or pieces is drawn once
                calls.append(call)
            stack.append(frame)
        elif event == "return":
            stack.remove(frame)

    sys.setprofile(watch)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


def test_the_drawing_of_a_step_is_what_a_step_calls():
    """That of rank 0, the owner of the one matrix."""
    drawn = drawing()
    assert run_ranks(calls_of_a_step, 2, drawn)[0] == drawn


def answers():
    """Return the answers to the five questions, each with its question."""
    section = PAGE.read_text().partition("### Five questions\n")[2].partition("\n## ")[0]
    return section.split("\n- **")[1:]


def named(text):
    """Return the file and the name of each `FILE.py: NAME` in a text."""
    return re.findall(r"`([\w/]+)\.py: ([\w.]+)`", text)


def test_each_of_five_questions_is_answered_by_file_and_name():
    assert len(answers()) == 5
    for answer in answers():
        assert named(answer), answer
        assert len(named(answer)) == answer.count("`") / 2, f"not `FILE.py: NAME`: {answer}"


@pytest.mark.parametrize("file,name", [each for answer in answers() for each in named(answer)])
def test_the_answers_name_what_a_file_defines(file, name):
    if file.startswith("gpu/"):
        pytest.importorskip("triton")
    module = import_module(f"torchmars.optim.{file.replace('/', '.')}")
    found = attrgetter(name)(module)
    assert getattr(found, "__module__", module.__name__) == module.__name__, "only imported there"
