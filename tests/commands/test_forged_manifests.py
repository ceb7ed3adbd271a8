"""Manifests of checkpoints that are forged: each ends in one line."""

import json

import pytest

from tests.support.damage import sealed
from tests.support.mistakes import make_checkpoint, mistake
from torchmars.exchange.saved_model import load_model

NEEDED = {
    "run": {"seed": 0},
    "training": {"dtype": "float32", "compile": False},
    "optimizer": {"matrix_dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"vocab_size": 3e9}, "vocab_size must be a valid integer"),
        ({"vocab_size": 3 * 10**9}, "vocab_size must be less than or equal to 10000000"),
        ({"step": "2"}, "step must be a valid integer, got '2'"),
        ({"files": {"../x": {"size": 0, "sha256": ""}}}, "files.../x must be one name"),
        ({"config": NEEDED | {"model": {"n_layer": 3 * 10**9}}}, "model.n_layer must be"),
        ({"config": []}, "config must be an object"),
        ({"config": {"run": {"seed": 0}}}, "config.training.dtype is missing"),
    ],
)
def test_a_forged_manifest_is_told_from_a_good_one(place, change, message):
    file = make_checkpoint(place) / "manifest.json"
    file.write_text(sealed(json.loads(file.read_text()) | change))
    assert message in mistake(load_model, place / "runs" / "tiny")


def test_a_model_that_the_checkpoint_has_not_takes_no_memory(place):
    file = make_checkpoint(place) / "manifest.json"
    whole = json.loads(file.read_text())
    whole["config"]["model"] |= {"n_embd": 500_000, "n_layer": 500}
    file.write_text(sealed(whole))
    said = mistake(load_model, place / "runs" / "tiny")
    assert "does not have the model that its manifest.json describes" in said
