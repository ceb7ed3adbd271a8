"""Every shipped config is valid, and named after its optimizer."""

from pathlib import Path

import pytest

from torchmars.config.load import load_config

FILES = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config(file):
    config = load_config([str(file)], "test")
    rule = file.stem.replace("gpt2_small_", "").replace("quickstart_", "").replace("_", "-")
    assert config.optimizer.name == ("mars-adamw" if rule == "quickstart" else rule)
    if file.stem.startswith("gpt2_small"):
        assert (
            config.training.global_batch_size * config.training.seq_len * config.training.steps
            == 49_152_000_000
        )
        for gpus in (1, 2, 4, 8, 16, 32):
            config.training.microbatches(gpus)


def test_there_is_one_of_each_kind_for_each_rule():
    names = {file.stem for file in FILES}
    for rule in ("mars_lion", "mars_shampoo", "mars_m", "adamw", "lion", "muon"):
        assert {f"quickstart_{rule}", f"gpt2_small_{rule}"} <= names
    assert {"quickstart", "gpt2_small_mars_adamw"} <= names
