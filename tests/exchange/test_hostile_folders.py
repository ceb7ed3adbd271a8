"""Folders of transformers that are not what they should be: one line each, and no code is run."""

import json
import math
import os
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_moe import GLM
from tests.support.commands import run_command
from tests.support.mistakes import mistake
from tests.support.tiny import tiny_config, write_text
from torchmars.config.gpt2 import GPT2Args
from torchmars.config.llama import LlamaArgs
from torchmars.config.load import config_from_tables
from torchmars.exchange.families import counterparts, from_config, to_config
from torchmars.exchange.saved_model import CONFIG, TOKENIZER, open_folder
from torchmars.exchange.weights import INDEX, WEIGHTS
from torchmars.models.gpt2 import GPT2
from torchmars.models.llama import Llama
from torchmars.training.preparation import prepare_run

KEY = "model.norm.weight"
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 260, "seq_len": 16}
MODELS = {
    "llama": Llama(LlamaArgs(**SHAPE, n_kv_head=1, n_inner=8, rope_scaling_factor=8.0)),
    "gpt2": GPT2(GPT2Args(**SHAPE, bias=True)),
    "glm": Llama(LlamaArgs(**SHAPE | GLM | {"n_layer": 2}, n_kv_head=1, n_inner=8, n_expert=3)),
}


@pytest.fixture
def folder(tmp_path):
    """A good folder."""
    return make_folder(tmp_path / "model", MODELS["llama"])


def make_folder(folder, model):
    weights = model.state_dict()
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(to_config(model)))
    theirs = {}
    for ours, there in counterparts(model).items():
        weight = weights[ours].T if there.transposed else weights[ours]
        each = weight if there.experts else [weight.contiguous()]
        theirs |= {name: value.clone() for name, value in zip(there.names, each, strict=True)}
    save_file(theirs, folder / WEIGHTS)
    return folder


def config(**changes):
    def change(folder):
        file = folder / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(change_tensors):
    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        change_tensors(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change


def header(text):
    def change(folder):
        size = struct.pack("<Q", len(text))
        (folder / WEIGHTS).write_bytes(size + text.encode() + bytes(64))

    return change


OVERLAPPING = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
OVERLAPPING = {"a": OVERLAPPING, "b": OVERLAPPING | {"data_offsets": [8, 24]}}


def index(text):
    def change(folder):
        (folder / WEIGHTS).unlink()  # it would be taken in place of the index
        (folder / INDEX).write_text(text)

    return change


def pickle_only(folder):
    """Leave weights that would create the file `ran` if they were unpickled."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    (folder / WEIGHTS).unlink()
    torch.save({KEY: Bomb()}, folder / "pytorch_model.bin")


def as_fifo(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def rope(**changes):
    table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    return config(
        rope_scaling=table
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        | changes
    )


WRONG = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "config.json cannot be read"),
    "config fifo": (as_fifo(CONFIG), "config.json cannot be read"),
    "config no JSON": (
        lambda folder: (folder / CONFIG).write_text("{"),
        "config.json cannot be read",
    ),
    "config nested": (lambda folder: (folder / CONFIG).write_text("[" * 10**5), "no JSON object"),
    "negative": (config(hidden_size=-8), "hidden_size is -8: it must be a number"),
    "absurd rows": (
        config(vocab_size=10**15),
        "model.vocab_size must be less than or equal to 10000000",
    ),
    "list": (config(model_type=["llama"]), "model_type is ..llama.."),
    "rope NaN": (rope(factor=float("nan")), "its factor is nan: it must be a number"),
    "rope factors": (
        rope(low_freq_factor=float("nan")),
        "low_freq_factor is nan: only models",
    ),
    "theta NaN": (
        config(rope_theta=float("nan")),
        "its rope_theta is nan: it must be a number",
    ),
    "pickle only": (pickle_only, "no model.safetensors, but pytorch_model.bin, .* may run code"),
    "weights fifo": (as_fifo(WEIGHTS), "Not a regular file"),
    "overlapping": (header(json.dumps(OVERLAPPING)), "invalid offset"),
    "header no JSON": (header("hello"), "invalid JSON"),
    "extra": (weights(lambda tensors: tensors.update(x=torch.ones(1))), "has x, which no model"),
    "index no JSON": (index("x"), "is no index of files beside it"),
    "index a list": (index("[]"), "is no index of files beside it"),
    "index above": (index(f'{{"weight_map": {{"{KEY}": "../x.safetensors"}}}}'), "no index of"),
    "index absolute": (index(f'{{"weight_map": {{"{KEY}": "/etc/passwd"}}}}'), "no index of"),
    "index of numbers": (index(f'{{"weight_map": {{"{KEY}": 5}}}}'), "no index of files"),
    "index of no weights": (index(f'{{"weight_map": {{"{KEY}": "{CONFIG}"}}}}'), "cannot read"),
    "tokenizer no JSON": (lambda folder: (folder / TOKENIZER).write_text("x"), "no tokenizer.json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(folder, case):
    change, message = WRONG[case]
    change(folder)
    files = sorted(folder.parent.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", None)
        said = mistake(open_folder, folder)
    assert f"{folder} cannot be opened: " in said
    assert re.search(message, said), said
    assert sorted(folder.parent.rglob("*")) == files


ODD = (None, "x", [0], {"a": 1}, True, -1, 0, 1.5, math.nan, 10**400)


@pytest.mark.parametrize("kind", MODELS)
def test_any_value_of_a_key_is_read_or_refused_in_one_line(kind):
    def read(given):
        table = from_config(given)
        config_from_tables({"training": {"seq_len": table.pop("seq_len")}, "model": table}, "here")

    config = to_config(MODELS[kind])
    assert mistake(read, config) == ""
    lines = [mistake(read, config | {key: value}) for key in config for value in ODD]
    assert sum(map(bool, lines)) > len(lines) / 2


@pytest.mark.parametrize("case", ["pickle only", "index above"])
def test_commands_and_runs_end_in_that_line(folder, tmp_path, case):
    change, _ = WRONG[case]
    write_text(tmp_path)
    found = open_folder(folder).tables
    config = tiny_config(tmp_path, model=found["model"], checkpoint=found["checkpoint"])
    assert mistake(prepare_run, config, 1, 1) == ""
    change(folder)
    assert "error: checkpoint.init_from: " in mistake(prepare_run, config, 1, 1)
    for command, args in (("import", ["new.toml"]), ("generate", [])):
        code, out, err = run_command(command, [str(folder), *args], tmp_path)
        assert code == 2 and err.count("\n") == 1 and err.startswith("error: ") and not out, err
    assert not (tmp_path / "new.toml").exists() and not (folder / "ran").exists()
