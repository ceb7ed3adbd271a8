"""QK-clip in runs: resumed, on another layout, and beside an average of the weights.

What it scales on layouts is in test_composition.py.
"""

import pytest
import torch

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer


def tables(folder, name, steps=6, **sections):
    sections["training"] = {"steps": steps, "qk_clip": 0.02} | sections.get("training", {})
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
    sections["model"] = {"name": "llama", "tied": True} | shape | sections.get("model", {})
    rule = {"name": "mars-m", "matrix_dtype": "float32"} | sections.pop("optimizer", {})
    return tiny_tables(folder, run={"name": name}, optimizer=rule, **sections)


@FULL
def test_a_run_resumes_to_the_last_bit_and_agrees_on_layouts(tmp_path):
    write_text(tmp_path)
    watched = {"metrics": {"attention": True}, "schedule": {"name": "constant"}}
    straight, never = tables(tmp_path, "straight", **watched), tables(tmp_path, "never", **watched)
    never["training"]["qk_clip"] = 0.0
    train(1, straight, never, tables(tmp_path, "resumed", steps=3, **watched))
    train(1, tables(tmp_path, "resumed", **watched))
    train(2, tables(tmp_path, "tp", parallelism={"tp": 2}, **watched))
    found = {name: metrics(tables(tmp_path, name)) for name in ("straight", "resumed", "never")}
    assert found["straight"] == found["resumed"] and found["straight"] != found["never"]
    assert metrics(tables(tmp_path, "tp")) == pytest.approx(found["straight"], rel=1e-5)


def one_step(given):
    """The weights before and after a step, and their average."""
    config = config_from_tables(given, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    weights, average = trainer.model.weights, trainer.average.values
    before = {name: each.detach().clone() for name, each in weights.items()}
    trainer.train_step()
    trainer.flags.result()
    after = {name: each.detach().clone() for name, each in weights.items()}
    return before, after, {name: each.clone() for name, each in average.items()}


@pytest.mark.parametrize("mode", ["approx", "exact"])
def test_the_average_is_of_clipped_weights(tmp_path, mode):
    """Which a step makes of those that a step without the clip makes."""
    write_text(tmp_path)
    of = {"training": {"ema_decay": 0.5}, "optimizer": {"mode": mode}}
    clipped, free = tables(tmp_path, "clipped", **of), tables(tmp_path, "free", **of)
    free["training"]["qk_clip"] = 0.0
    [(before, after, average)] = run_ranks(one_step, 1, clipped)
    [(_, plain, _)] = run_ranks(one_step, 1, free)
    differ = {name.split(".")[-2] for name in after if not torch.equal(after[name], plain[name])}
    assert differ == {"q", "k"}
    for name, value in average.items():
        torch.testing.assert_close(value, (before[name] + after[name]) / 2, rtol=1e-6, atol=1e-8)
