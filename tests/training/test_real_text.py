"""Real prose with GPT-2's tokenizer, where it is at hand: the loss falls."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train_here

DATA = Path(__file__).parents[3] / "shared" / "data"


def train_with_bpe(tables, bpe):
    os.environ["TIKTOKEN_CACHE_DIR"] = bpe
    train_here(tables)


@pytest.mark.skipif(
    not (DATA / "tinyshakespeare").is_dir(), reason="needs tinyshakespeare and GPT-2's BPE files"
)
@pytest.mark.slow
def test_tinyshakespeare(tmp_path):
    shutil.copytree(DATA / "tiktoken_cache", tmp_path / "bpe")  # tiktoken may delete from its cache
    tables = tiny_tables(
        tmp_path,
        data={"files": [str(DATA / "tinyshakespeare" / "input.txt")], "tokenizer": "gpt2"},
        training={"steps": 40, "seq_len": 64},
        optimizer={"lr": 0.01},
    )
    run_ranks(train_with_bpe, 2, tables, str(tmp_path / "bpe"))
    losses = metrics(tables)
    assert losses[1] == pytest.approx(10.8, abs=0.1)  # log(50304)
    assert losses[40] < 8
