"""Real prose with GPT-2's tokenizer, where it is at hand: the loss falls."""

import os
import shutil

import pytest

from tests.support.ranks import run_ranks
from tests.support.real_data import FOLDER, needs_data
from tests.support.tiny import metrics, tiny_tables, train_here


def train_with_bpe(tables, bpe):
    os.environ["TIKTOKEN_CACHE_DIR"] = bpe
    train_here(tables)


@needs_data("tinyshakespeare", "tiktoken_cache")
@pytest.mark.slow
def test_tinyshakespeare(tmp_path):
    shutil.copytree(
        FOLDER / "tiktoken_cache", tmp_path / "bpe"
    )  # tiktoken may delete from its cache
    tables = tiny_tables(
        tmp_path,
        data={"files": [str(FOLDER / "tinyshakespeare" / "input.txt")], "tokenizer": "gpt2"},
        training={"steps": 40, "seq_len": 64},
        optimizer={"lr": 0.01},
    )
    run_ranks(train_with_bpe, 2, tables, str(tmp_path / "bpe"))
    losses = metrics(tables)
    assert losses[1] == pytest.approx(10.8, abs=0.1)  # log(50304)
    assert losses[40] < 8
