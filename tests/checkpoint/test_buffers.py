"""Biases of routers, which are no weights: as they were on every layout, in files and exports."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_moe import EXPERTS, GLM
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import run_folder_of, tiny_tables, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.exchange.export import export
from torchmars.exchange.saved_model import load_model, load_sharded_model, open_model
from torchmars.models import build_model
from torchmars.training.build import build_trainer

MODEL = {"name": "llama", "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_replicate": 2}]


def tables_of(folder, name="run", **parallelism):
    return tiny_tables(
        folder,
        run={"name": name},
        model=MODEL | EXPERTS | GLM | {"n_expert_inner": 16},
        parallelism=parallelism,
        training={"ema_decay": 0.5},
        checkpoint={"init_from": str(folder / "first.safetensors"), "async_save": False},
    )


def kept_on_each(folder):
    """The biases that this rank has on each of LAYOUTS; each run goes on from the one before."""
    kept = []
    for step, settings in enumerate(LAYOUTS, start=1):
        config = config_from_tables(tables_of(folder, **settings), "in a test")
        trainer = build_trainer(config, connection.start(config.parallelism))
        trainer.loader.close()
        assert trainer.state.step == step - 1
        kept.append({name: bias.clone() for name, bias in trainer.model.buffers.items()})
        assert not trainer.model.buffers.keys() & trainer.average.values.keys()
        trainer.checkpointer.save(replace(trainer.state, step=step))
    layout = connection.start(config.parallelism)
    sharded, _ = load_sharded_model(run_folder_of(tables_of(folder)), layout, "float32")
    kept.append(sharded.buffers)
    fresh = build_trainer(replace(config, **fresh_of(config)), layout)
    fresh.loader.close()
    kept.append(fresh.model.buffers)
    return kept


def fresh_of(config):
    """What makes of `config` a run that starts from no weights."""
    return {
        "run": replace(config.run, name="fresh"),
        "checkpoint": replace(config.checkpoint, init_from=None),
    }


@FULL
def test_biases_of_routers_are_kept_on_every_layout_and_in_every_file(tmp_path):
    write_text(tmp_path)
    table = config_from_tables(tables_of(tmp_path), "in a test").model
    model = build_model(table, 257, 32)
    generator = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        torch.nn.init.normal_(value, float("norm" in name), 0.1, generator)
    expected = {name: bias.clone() for name, bias in model.named_buffers()}
    assert list(expected) == [f"blocks.{number}.mlp.router.bias" for number in (1, 2)]
    save_file(model.state_dict(), tmp_path / "first.safetensors")
    for *saved, sharded, fresh in run_ranks(kept_on_each, 2, tmp_path):
        assert [len(each) for each in saved] == [2, 2, 1, 2, 2]
        for found in (*saved, sharded):
            for name, bias in found.items():
                assert bias.dtype == torch.float32 and torch.equal(bias, expected[name])
        assert fresh.keys() == expected.keys() and not any(map(torch.any, fresh.values()))
    run = run_folder_of(tables_of(tmp_path))
    loaded, _, _ = load_model(run)
    for name, bias in loaded.named_buffers():
        assert torch.equal(bias, expected[name])
    for average in (False, True):
        opened = open_model(run, average=average)
        target = tmp_path / f"export {average}"
        bare = tmp_path / f"bare {average}"
        export(opened, bare, "safetensors", "bfloat16")
        export(opened, target, "hf", "bfloat16")
        ours, theirs = load_file(bare / "model.safetensors"), {}
        for file in target.glob("*.safetensors"):
            theirs |= load_file(file)
        for number in (1, 2):
            bias = expected[f"blocks.{number}.mlp.router.bias"]
            there = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
            assert torch.equal(ours[f"blocks.{number}.mlp.router.bias"], bias)
            assert torch.equal(theirs[there], bias) and theirs[there].dtype == torch.float32
        assert ours["blocks.1.mlp.router.weight"].dtype == torch.bfloat16


def test_a_file_without_the_biases_is_one_line(tmp_path):
    write_text(tmp_path)
    config = config_from_tables(tables_of(tmp_path), "in a test")
    model = build_model(config.model, 257, 32)
    save_file(dict(model.named_parameters()), tmp_path / "first.safetensors")
    with pytest.raises(UserError, match="blocks.1.mlp.router.bias not at all, the config's model"):
        build_trainer(config, connection.start(config.parallelism))
