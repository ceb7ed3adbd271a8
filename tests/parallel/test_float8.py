"""Linear layers in float8, emulated: training, its checkpoints, and what is refused."""

import importlib.util
import re
from functools import partial

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen_here,
    metrics,
    tiny_config,
    tiny_tables,
    write_text,
)
from torchmars.begin import install_command
from torchmars.config.training import Float8Config
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel import float8, parallel_model

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)


@pytest.fixture
def model(tmp_path):
    return build_meta_model(tiny_config(tmp_path).model, 257, 32)


def test_a_machine_that_cannot_gets_one_line(model, monkeypatch):
    find = importlib.util.find_spec
    for spec, message in (
        (None, rf"needs the package torchao: {re.escape(install_command('float8'))}$"),
        (find("torch"), 'recipe = "rowwise" needs a GPU that multiplies float8 .* not a CPU: set'),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(UserError, match=message):
            float8.convert_layers(model, Float8Config("rowwise"), torch.device("cpu"))
    float8.convert_layers(model, Float8Config(), torch.device("cpu"))


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_layers_of_blocks_are_converted_and_keep_their_names(model, recipe):
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    float8.convert_layers(model, Float8Config(recipe), torch.device("cpu"), emulate=True)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {
        f"blocks.{number}.{layer}"
        for number in range(2)
        for layer in ("attn.qkv", "attn.proj", "mlp.up", "mlp.proj")
    }
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    layer = model.blocks["0"].get_submodule("mlp.up").to_empty(device="cpu")
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight, std=0.02)
    torch.nn.init.zeros_(layer.bias) if layer.bias is not None else None
    x = torch.randn(64, layer.in_features)
    error = layer(x) - torch.nn.functional.linear(x, layer.weight, layer.bias)
    relative = (error.norm() / layer(x).norm()).item()
    assert 1e-3 < relative < 0.05  # three bits of mantissa


def losses_on(tables, after):
    """What a run of this process group says, and that it goes on without float8."""
    parallel_model.convert_layers = partial(float8.convert_layers, emulate=True)
    return listen_here(tables), listen_here(after)


@needs_torchao
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_run_learns_as_in_float32_and_goes_on_without_float8(tmp_path, name):
    """On two ranks with FSDP; the checkpoint of a run with float8 is one like any other."""
    write_text(tmp_path)

    def tables(run, steps, float8):
        return tiny_tables(
            tmp_path,
            run={"name": run},
            training={"steps": steps, "float8": float8, "dtype": "float32"},
            optimizer={"lr": 1e-3},
            schedule={"name": "constant", "warmup_steps": 0},
        )

    with_float8 = tables("float8", 12, {"recipe": name})
    said, after = run_ranks(losses_on, 2, with_float8, tables("float8", 15, {}))[0]
    assert f"{name} float8" in said
    assert f"changed   training.float8.recipe {name} -> none" in after
    plain = tables("plain", 15, {})
    run_ranks(listen_here, 2, plain)
    found, expected = metrics(with_float8), metrics(plain)
    assert list(found) == list(expected) == list(range(1, 16))
    assert found != expected and found[12] < found[1] - 0.5
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=2e-3), step
