"""Linear layers in float8, emulated: training, its checkpoints, and what is refused."""

import importlib.util

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen_here,
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint.index import read_index
from torchmars.checkpoint.manifest import read
from torchmars.checkpoint.reader import read_tensors
from torchmars.config.float8 import Float8Config
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel import float8
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.planning.traffic import TrafficCounter

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao"
)


@pytest.fixture
def model(tmp_path):
    return build_meta_model(tiny_config(tmp_path).model, 257, 32)


def test_a_machine_that_cannot_gets_one_line(model, monkeypatch):
    find = importlib.util.find_spec
    for spec, message in (
        (None, r"needs the package torchao: pip install 'torchmars\[float8\]'$"),
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
    float8.convert_layers(model, Float8Config(recipe, emulate=True), torch.device("cpu"))
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
    return listen_here(tables), listen_here(after)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_run_learns_as_in_float32_and_goes_on_without_float8(tmp_path, recipe):
    """On two ranks with FSDP; the checkpoint of a run with float8 is one like any other."""
    write_text(tmp_path)

    def tables(name, steps, float8):
        training = {"steps": steps, "float8": float8, "dtype": "float32"}
        return tiny_tables(
            tmp_path,
            run={"name": name},
            training=training,
            optimizer={"lr": 1e-3},
            schedule={"name": "constant", "warmup_steps": 0},
        )

    with_float8 = tables("float8", 12, {"recipe": recipe, "emulate": True})
    said, after = run_ranks(losses_on, 2, with_float8, tables("float8", 15, {}))[0]
    assert f"{recipe} float8" in said
    assert f"changed   training.float8.recipe {recipe} -> none" in after
    plain = tables("plain", 15, {})
    run_ranks(listen_here, 2, plain)
    found, expected = metrics(with_float8), metrics(plain)
    assert list(found) == list(expected) == list(range(1, 16))
    assert found != expected and found[12] < found[1] - 0.5
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=2e-3), step


def traffic_on(config):
    """The bytes and times of each kind of collective of a backward pass, and what scales take."""
    layout = Layout.create(torch.device("cpu"), config.parallelism.degrees(2))
    model = ParallelModel(
        build_meta_model(config.model, 257, 32),
        config.parallelism,
        config.training,
        config.activation_checkpoint,
        layout,
        layout.device,
    )
    model.init_weights(0)
    torch.manual_seed(layout.world.rank)
    with TrafficCounter() as counter:
        model.backward([torch.randint(257, (2, 33))])
    found = {kind.operation: (counter.sent[kind], times) for kind, times in counter.times.items()}
    with CommDebugMode() as scales:
        model.follow_weights()
    return found, scales.get_total_counts()


def train_in_float8(configs, runs):
    """What each of `configs` sends, and what this rank says of each of the runs."""
    return [traffic_on(config) for config in configs], [listen_here(run) for run in runs]


def checkpoint_of(tables, step):
    """Return the tensors of a checkpoint of the run of `tables` by name, as one process has them.

    Those of random number generators are left out.
    """
    folder = run_folder_of(tables) / "checkpoints" / f"step-{step:08}"
    index = read_index(folder, read(folder))
    state = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in index.state_dict_metadata.items()
        if not name.startswith("rng.")
    }
    read_tensors(folder, state, index)
    return state


@needs_torchao
def test_a_rank_alone_gathers_nothing_in_float8(tmp_path):
    write_text(tmp_path)
    runs = [
        tiny_tables(
            tmp_path,
            run={"name": f"gathered {all_gather}"},
            training={
                "steps": 3,
                "dtype": "bfloat16",
                "float8": {"recipe": "tensorwise", "emulate": True, "all_gather": all_gather},
            },
        )
        for all_gather in (False, True)
    ]
    train(1, *runs)
    assert metrics(runs[0]) == metrics(runs[1]) and len(metrics(runs[0])) == 3


@needs_torchao
def test_weights_gathered_in_float8_are_those_that_layers_round_themselves(tmp_path):
    """In float32 to the last bit: losses, weights, state and average, also over two resumes."""
    write_text(tmp_path)

    def sections(name, steps, all_gather):
        float8 = {"recipe": "tensorwise", "emulate": True, "all_gather": all_gather}
        return {
            "run": {"name": name},
            "training": {"steps": steps, "float8": float8, "dtype": "float32", "ema_decay": 0.9},
            "optimizer": {"name": "mars-m", "lr": 1e-2},
            "schedule": {"name": "constant", "warmup_steps": 0},
        }

    parts = [("gathered", 3, True), ("gathered", 6, True), ("gathered", 9, False)]
    *gathered, plain = (
        tiny_tables(tmp_path, **sections(*each)) for each in (*parts, ("plain", 9, False))
    )
    configs = [tiny_config(tmp_path, **sections("none", 1, each)) for each in (True, False)]
    ((sent, scales), (own, none)), said = run_ranks(
        train_in_float8, 2, configs, [*gathered, plain]
    )[0]
    assert "float8" in said[0] and "from step 3" in said[1]
    assert "changed   training.float8.all_gather True -> False" in said[2]
    assert metrics(plain) == metrics(gathered[0]) and list(metrics(plain)) == list(range(1, 10))
    found, expected = checkpoint_of(gathered[0], 9), checkpoint_of(plain, 9)
    assert found.keys() == expected.keys() and any(name.startswith("ema.") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Half of each weight goes to the other rank, of 12 * 32 * 32 in each of two blocks.
    saved = (own["all-gather"][0] - sent["all-gather"][0]) / own["all-gather"][1]
    assert saved == 2 * 12 * 32 * 32 / 2 * (4 - 1)
    assert {kind: sent[kind][1] for kind in sent} == {kind: own[kind][1] for kind in own}
    assert (scales, none) == (1, 0)
