"""Manifests of data and checkpoints that say anything: each ends in one line, or is read."""

import copy
import json

import pytest
from hypothesis import strategies as st

from tests.support.damage import sealed
from tests.support.mistakes import fuzz, junk, make_checkpoint, mistake, sizes, words
from torchmars.checkpoint.upkeep import prune_checkpoints, verify_checkpoints
from torchmars.config.load import load_config
from torchmars.exchange.saved_model import load_model
from torchmars.training.preparation import prepare_run


def containers(value):
    """All (table or list, key) pairs within `value`."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from containers(value[key])


@st.composite
def altered(draw, value):
    """`value` with some of what is in it replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        places = list(containers(value))
        owner, key = places[draw(st.integers(0, len(places) - 1))]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "replace":
            owner[key] = draw(junk)
        elif action == "remove":
            del owner[key]
        elif isinstance(owner, dict):
            owner[draw(words)] = draw(junk)
        if not value:
            break
    return value


TEXTS = [
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"format": ' + "9" * 5000 + "}",
    "\ufeff{}",
    "[]",
    "null",
    "3",
    '"format"',
    "{}",
    "",
]
broken_texts = st.one_of(st.sampled_from(TEXTS).map(str.encode), st.binary(max_size=20))


@sizes
def test_manifests_of_data(place, examples):
    file, config = place / "shards" / "manifest.json", load_config(["tiny.toml"], "test")
    whole = json.loads(file.read_text())

    def check(drawn):
        file.write_bytes(drawn if isinstance(drawn, bytes) else sealed(drawn).encode())
        mistake(prepare_run, config, 2, 1)

    fuzz(examples, st.one_of(altered(whole), altered(whole), broken_texts), check)


@sizes
def test_manifests_of_checkpoints(place, examples):
    checkpoint = make_checkpoint(place)
    file, run = checkpoint / "manifest.json", place / "runs" / "tiny"
    whole, config = json.loads(file.read_text()), load_config(["tiny.toml"], "test")
    assert mistake(prepare_run, config, 2, 1) == mistake(load_model, run) == ""

    def check(drawn):
        file.write_bytes(drawn if isinstance(drawn, bytes) else sealed(drawn).encode())
        mistake(prepare_run, config, 2, 1)
        mistake(load_model, run)
        mistake(verify_checkpoints, checkpoint.parent)
        mistake(prune_checkpoints, place / "other", checkpoint.parent, {}, True, True)

    fuzz(examples, st.one_of(altered(whole), altered(whole), broken_texts), check)


NEEDED = {
    "run": {"seed": 0},
    "training": {"dtype": "float32", "compile": False},
    "optimizer": {"matrix_dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"vocab_size": 3e9}, "vocab_size must be a whole number"),
        ({"vocab_size": 3 * 10**9}, "vocab_size must be at most 10,000,000"),
        ({"step": "2"}, "step must be a whole number, got '2'"),
        ({"files": {"../x": {"size": 0, "sha256": ""}}}, "files must be one file name"),
        ({"config": NEEDED | {"model": {"n_layer": 3 * 10**9}}}, "model.n_layer must be"),
        ({"config": []}, "config must be a table"),
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
