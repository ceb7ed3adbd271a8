"""The run that is measured, and what its metrics are worth."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import tiny_config, write_config
from torchmars.benchmark.measure import has_shards, ranks_of, read_measurement, short_run, train
from torchmars.benchmark.synthetic import write_random_shards
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
    found = short_run(config, 6, 9, tmp_path / "scratch")
    file = tmp_path / "bench.toml"
    write_config(found, file)
    assert load_config([str(file)], "test") == found
    for section in ("model", "optimizer", "parallelism", "guards"):
        assert getattr(found, section) == getattr(config, section)
    assert found.training.steps == 15 and found.metrics.log_interval == 3
    assert found.schedule.name == "constant" and found.schedule.warmup_steps == 7
    assert not found.checkpoint.interval and not found.checkpoint.at_end
    assert found.checkpoint.init_from is None and not found.metrics.wandb
    assert not found.evaluation.interval and not found.validation.interval


def test_lines_count_by_their_steps(tmp_path):
    config = tiny_config(tmp_path)  # 512 tokens in each step
    file = tmp_path / "metrics.jsonl"

    def line(step, seconds, forward):
        rate = 512 / seconds
        values = {"loss": 1.0, "tokens_per_second": rate, "forward_ms": forward, "mfu": rate / 1e4}
        named = {f"train/{name}": value for name, value in values.items()}
        return {"step": step, "train/memory_gib": 0.5 + step, "train/optimizer_ms": 7.0} | named

    lines = [line(1, 9, 1), line(4, 2, 1), {"step": 4, "checkpoint/stall_ms": 1.0}]
    lines += [line(8, 1, 10), line(10, 4, 40)]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = read_measurement(file, 4, config)
    assert found.step_ms == pytest.approx(2000)  # 4 steps of 1 s and 2 of 4 s
    assert found.tokens_per_second == pytest.approx(256)
    assert found.mfu == pytest.approx(256 / 1e4)
    assert found.phases_ms == pytest.approx({"optimizer": 7, "forward": 20})
    assert found.memory_gib == 10.5


def test_random_shards_are_those_of_a_run(tmp_path):
    config = tiny_config(tmp_path, data={"tokenizer": "gpt2"})
    data = write_random_shards(config.data, 3001, tmp_path / "random")
    found = tiny_config(tmp_path, data=vars(data))
    assert has_shards(found) and not has_shards(config)
    [part] = prepare_data(found).parts  # which makes none
    assert part.folder == Path(data.path) and part.manifest.splits["train"].tokens == 4000
    tokens = np.fromfile(part.folder / "train-00000-000.bin", dtype="<u2")
    assert tokens.max() < 50257 and np.count_nonzero(tokens == 50256) >= 4
    assert len(np.unique(tokens)) > 3500


def test_random_documents_begin_as_the_config_says(tmp_path):
    config = tiny_config(tmp_path, data={"begin_token": "a"})
    found = tiny_config(tmp_path, data=vars(write_random_shards(config.data, 3001, tmp_path / "x")))
    [part] = prepare_data(found).parts
    tokens = np.fromfile(part.folder / "train-00000-000.bin", dtype="<u2")
    assert part.manifest.begin_token == 97
    assert (tokens[::1000] == 97).all() and (tokens[999::1000] == 256).all()


@pytest.mark.parametrize(
    "parallelism,ranks",
    [({}, 2), ({"tp": 2}, 2), ({"pp": 4}, 4), ({"tp": 3, "dp_shard": 2}, 6)],
)
def test_ranks_are_those_that_the_layout_asks_for(tmp_path, monkeypatch, parallelism, ranks):
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = tiny_config(tmp_path, parallelism=parallelism)
    assert ranks_of(config) == ranks
    monkeypatch.setenv("NGPU", "12")
    assert ranks_of(config) == 12


def test_the_measured_run_is_one_of_torchmars_train(tmp_path):
    """By a mistake that it finds: other tests start it in processes of their own."""
    file, output = tmp_path / "run.toml", tmp_path / "output"
    file.write_text("[training]\nstpes = 3\n")
    with output.open("w") as stream:
        assert train(file, 1, stream.fileno()) == 2
    assert "unknown key training.stpes" in output.read_text()
