"""The run that is measured, and its random tokens."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import tiny_config, write_config
from torchmars.benchmark.measure import ranks_of, short_run, write_random_shards
from torchmars.config.load import load_config
from torchmars.training.preparation import prepare_data


def test_the_run_is_that_of_the_config_without_what_is_no_training(tmp_path):
    kept = {"optimizer": {"name": "mars-m"}, "model": {"dropout": 0.5}}
    kept |= {"guards": {"loss_spike": "skip"}, "parallelism": {"tp": 2}}
    config = tiny_config(
        tmp_path,
        **kept,
        schedule={"name": "wsd", "warmup_steps": 7},
        checkpoint={"interval": 5, "init_from": "somewhere", "init_optimizer": True},
        evaluation={"tasks": ["sciq"]},
        validation={"interval": 3, "sample_tokens": 9},
        metrics={"wandb": True},
    )
    found = short_run(config, 6, tmp_path)
    file = tmp_path / "bench.toml"
    write_config(found, file)
    assert load_config([str(file)], "test") == found
    for section in ("model", "optimizer", "parallelism", "guards"):
        assert getattr(found, section) == getattr(config, section)
    assert found.training.steps == 12 and found.metrics.log_interval == 6
    assert found.schedule.name == "constant" and found.schedule.warmup_steps == 7
    assert not found.checkpoint.interval and not found.checkpoint.at_end
    assert found.checkpoint.init_from is None and not found.metrics.wandb
    assert not found.evaluation.interval and not found.validation.interval


def test_random_shards_are_those_of_a_run(tmp_path):
    config = tiny_config(tmp_path, data={"tokenizer": "gpt2"})
    data = write_random_shards(config.data, 3001, tmp_path / "random")
    found = tiny_config(tmp_path, data=vars(data))
    [part] = prepare_data(found).parts  # which makes none
    assert part.folder == Path(data.path) and part.manifest.splits["train"].tokens == 4000
    tokens = np.fromfile(part.folder / "train-00000.bin", dtype="<u2")
    assert tokens.max() < 50257 and np.count_nonzero(tokens == 50256) >= 4
    assert len(np.unique(tokens)) > 3500


@pytest.mark.parametrize(
    "parallelism,ranks",
    [({}, 2), ({"tp": 2}, 2), ({"pp": 4}, 4), ({"tp": 3, "dp_shard": 2}, 6)],
)
def test_ranks_are_those_that_the_layout_asks_for(tmp_path, monkeypatch, parallelism, ranks):
    monkeypatch.delenv("NGPU", raising=False)
    config = tiny_config(tmp_path, parallelism=parallelism)
    assert ranks_of(config, 2) == ranks
    monkeypatch.setenv("NGPU", "12")
    assert ranks_of(config, 2) == 12
