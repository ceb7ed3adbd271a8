"""The moving average of the weights, against the recurrence by hand, on any layout."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import run_command
from tests.support.full import FULL
from tests.support.tiny import listen, run_folder_of, tiny_tables, train, write_text
from torchmars.exchange.saved_model import open_model
from torchmars.models.initialize import init_weights

DECAY = 0.75


@pytest.fixture
def tables(tmp_path):
    write_text(tmp_path)
    return tiny_tables(
        tmp_path,
        model={"name": "llama", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32},
        training={"steps": 3, "ema_decay": DECAY},
        checkpoint={"interval": 1},
        optimizer={"lr": 0.02},
    )


def weights_at(tables, step, average=False):
    """The weights of a checkpoint, or their average, by name."""
    model = open_model(run_folder_of(tables), step, average)
    return {name: model.read(name) for name, _ in model.model.named_parameters()}


def after(average, weights):
    """The average after a step that made `weights`."""
    return {
        name: DECAY * average[name].double() + (1 - DECAY) * weights[name].double()
        for name in weights
    }


def check_equal(values, expected):
    for name, value in expected.items():
        torch.testing.assert_close(values[name].double(), value.double(), rtol=1e-6, atol=1e-7)


def with_training(tables, **training):
    return tables | {"training": tables["training"] | training}


def test_it_is_the_recurrence_from_the_initial_weights(tables, tmp_path):
    train(2, tables)
    model = open_model(run_folder_of(tables)).model.to_empty(device="cpu")
    init_weights(model, 0)
    expected = {name: value.detach() for name, value in model.named_parameters()}
    for step in (1, 2, 3):
        expected = after(expected, weights_at(tables, step))
    average = weights_at(tables, 3, average=True)
    check_equal(average, expected)
    run = str(run_folder_of(tables))
    code, _, err = run_command("export", [run, "ema", "--to", "safetensors", "--ema"], tmp_path)
    assert code == 0, err
    written = load_file(tmp_path / "ema" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in average.items())


@FULL
def test_it_resumes_on_another_layout(tables):
    train(2, with_training(tables, steps=2))
    other = with_training(tables, steps=4) | {"parallelism": {"tp": 2}}
    assert "continue  from step 2" in listen(2, other)
    expected = weights_at(tables, 2, average=True)
    for step in (3, 4):
        expected = after(expected, weights_at(tables, step))
    check_equal(weights_at(tables, 4, average=True), expected)


def test_switched_on_later_it_begins_as_the_weights_are(tables, tmp_path):
    train(1, with_training(tables, ema_decay=0.0, steps=2))
    code, _, err = run_command("export", [str(run_folder_of(tables)), "hf", "--ema"], tmp_path)
    assert code == 2 and "has no moving average of its weights" in err and err.count("\n") == 1
    train(1, tables)
    expected = after(weights_at(tables, 2), weights_at(tables, 3))
    check_equal(weights_at(tables, 3, average=True), expected)
