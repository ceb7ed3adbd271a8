"""Wrong calls from Python: each is a `UserError` of one line that names the argument."""

import contextlib
import io
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import torchmars
from tests.support.mistakes import make_checkpoint, make_place
from torchmars.config import Config
from torchmars.config.load import load_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in a working folder that has all kinds of files."""
    place = tmp_path_factory.mktemp("misuse")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_place(place)
        (place / "bad.yaml").write_text("task: bad\n")
        make_checkpoint(place)
        yield torchmars.load("runs/tiny", device="cpu")


class Other:
    """A thing of no type that is asked for."""


def train(config="tiny.toml", **settings):
    return lambda model: torchmars.run_training(config, **settings)


def plan(*args, **settings):
    return lambda model: torchmars.make_plan("tiny.toml", *args, **settings)


def load(*args):
    return lambda model: torchmars.load(*args)


def read(folder):
    return lambda model: torchmars.read_run(folder)


def generate(prompt="a", **settings):
    return lambda model: model.generate(prompt, **{"max_tokens": 1} | settings)


def logits(text):
    return lambda model: model.logits(text)


def evaluate(*tasks, **settings):
    return lambda model: model.evaluate(*tasks, **settings)


def ids(*values, **settings):
    return logits(torch.tensor(values, **settings))


def sparse():
    ones = torch.ones(2, 2, dtype=torch.int64)
    with warnings.catch_warnings():  # torch's, of a layout in beta
        warnings.simplefilter("ignore")
        return ones.to_sparse(), ones.to_sparse_csr()


NAN, HUGE, HALF = math.nan, 10**5000, "\ud800"
WRONG = {
    "ranks": [train(ranks=each) for each in (0, -1, None, 1.5, "2", True, NAN, 1001, np.int64(2))],
    "config": [
        *(train(each) for each in (None, 3, b"x", {"training": {}}, [None], Other(), iter(["x"]))),
        *(train(each) for each in ("", "\0", HALF, ["tiny.toml", 3], Config(), {"x"})),
        *(train(each) for each in ("nothing.toml", "folder", Path("nothing.toml"))),
        lambda model: torchmars.run_training(load_config(["tiny.toml"], ""), run={"name": "x"}),
    ],
    "file": [train("file"), train("fifo")],
    "training": [
        *(train(training=each) for each in (None, 3, [], {1: 2}, {"steps": None}, {"steps": NAN})),
        *(train(training={"steps": each}) for each in (HUGE, {3}, b"x", Other(), np.int64(3))),
    ],
    "optimizer": [
        *(train(optimizer=each) for each in (3, {"lr": NAN}, {"extra": {1: 2}}, {"betas": [1]})),
        *(train(optimizer=each) for each in ({"name": []}, {"groups": [3]}, {"groups": None})),
        train(optimizer={"lr": HUGE}),
    ],
    "data": [train(data=each) for each in ({"files": [Path("x")]}, {"mixture": [None]})],
    "model": [train(model={"name": "x"}), train(model={"extra": {"a": Other()}})],
    "plugins": [train(run={"plugins": each}) for each in (None, "x", [3], ["a b"], ["nothing"])],
    "unknown section": [train(nothing={})],
    "world_size|world-size": [plan(each) for each in (0, -1, None, 1.5, "8", True, 10**9, 9)],
    "gpus_per_node": [plan(2, each) for each in (-1, None, "8", NAN)],
    "folder|is neither a checkpoint": [
        *(load(each) for each in (None, 3, b"x", [], "", "\0", HALF, Other())),
        *(load(each) for each in ("nothing", "folder", "fifo", Path("file"))),
    ],
    "device": [load("runs/tiny", each) for each in ("x", "", "cuda:99", "meta", 3, [], True)],
    "folder|is not the folder": [read(each) for each in (None, 3, b"x", "", "\0", "file", "fifo")],
    "prompt": [generate(each) for each in (None, 3, b"x", [None], {1: 2}, HALF, ["a", HALF], NAN)],
    "max_tokens": [generate(max_tokens=each) for each in (0, None, 1.5, "3", True, 10**30)],
    "temperature": [generate(temperature=each) for each in (-1, NAN, math.inf, "x", 1j, None)],
    "top_k": [generate(top_k=each) for each in (0, 1.5, "x", True)],
    "top_p": [generate(top_p=each) for each in (0, 1.5, NAN, "x")],
    "seed": [generate(seed=each) for each in (None, 1.5, "x", NAN)],
    "text": [
        *(logits(each) for each in (None, 3, b"x", [1], HALF, np.array([1]), Other())),
        *(ids(*each) for each in ([], [1.0], [True], [10**6], [-1], [[[1]]], [[], []])),
        *(logits(each) for each in (torch.tensor(1), *sparse())),
        ids(1, device="meta"),
        *(evaluate(text=each) for each in (3, [], "", "\0", "nothing.txt", "folder", b"x")),
    ],
    "the model sees": [logits("x" * 33), ids(*range(33))],
    "task": [
        *(evaluate(each) for each in (None, 3, [None], b"x", {"a": 1}, "", "nothing.yaml")),
        *(evaluate(each) for each in ("bad.yaml", "\0.yaml", ["bad.yaml", "bad.yaml"])),
        *(evaluate(each) for each in ((), [])),
    ],
    "shots": [evaluate("bad.yaml", shots=each) for each in (-1, "x", 1.5)],
    "limit": [evaluate("bad.yaml", limit=each) for each in (-1, 0, "x")],
    "batch_size": [evaluate("bad.yaml", batch_size=each) for each in (0, None, "x")],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_line_that_names_the_argument(model, name):
    for number, call in enumerate(WRONG[name]):
        with contextlib.redirect_stdout(io.StringIO()):
            with pytest.raises(torchmars.UserError, match=name) as found:
                call(model)
        assert "\n" not in str(found.value) and len(str(found.value)) < 500, (name, number)


NEITHER = "is neither a checkpoint nor a run with one"


@pytest.mark.parametrize(
    "path,said",
    [
        ("m", f"m {NEITHER} (it does not exist): did you mean runs/m?"),
        ("none", f"none {NEITHER} (it does not exist): name one that torchmars runs lists"),
        ("runs", f"runs {NEITHER}: name one that torchmars runs lists"),
        (
            "m.safetensors",
            "m.safetensors is a file: name a run, a checkpoint or a folder of transformers",
        ),
    ],
)
def test_a_path_without_a_model_has_a_remedy(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "m").mkdir(parents=True)
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(torchmars.UserError, match=f"^{re.escape(said)}$"):
        torchmars.load(path)


def test_whole_numbers_of_any_size_are_tokens(model):
    expected = model.logits("ab")
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(model.logits(torch.tensor([97, 98], dtype=dtype)), expected)


def test_a_model_whose_folder_is_gone_says_so(model, tmp_path):
    """It still computes. Measuring reads its weights once more."""
    gone = torchmars.LanguageModel(tmp_path / "gone", model.model, model.tokenizer, model.config)
    assert gone.generate("a", max_tokens=1, temperature=0) == model.generate(
        "a", max_tokens=1, temperature=0
    )
    with pytest.raises(torchmars.UserError, match="gone is neither a checkpoint nor"):
        gone.evaluate(text="text.txt")
