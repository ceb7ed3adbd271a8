"""Runs on a mixture: the same on every layout, resumed with the same and with other weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import (
    listen,
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint.manifest import read
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.data.order import Shares
from torchmars.planning.plan import plan_run
from torchmars.planning.report import plan_in_words
from torchmars.training.preparation import prepare_run

STEPS, BATCH, T = 6, 16, 32
WEIGHTS = {"fox": 0.5, "noise": 0.3, "tokens": 0.2}


def write_corpora(folder):
    """Two corpora of text and one of nanoGPT's tokens."""
    generator = np.random.default_rng(0)
    write_text(folder)
    lines = ["".join(map(chr, generator.integers(97, 123, size=400))) for _ in range(9)]
    (folder / "noise.txt").write_text("\n<|endoftext|>\n".join(lines))
    tokens = generator.integers(0, 257, size=20_000).astype("<u2")
    (folder / "train.bin").write_bytes(tokens.tobytes())


def tables_of(folder, weights=WEIGHTS, steps=STEPS, **run):
    sources = {
        "fox": {"source": "text", "files": [str(folder / "text.txt")]},
        "noise": {"source": "text", "files": [str(folder / "noise.txt")]},
        "tokens": {"source": f"nanogpt:{folder}/train.bin"},
    }
    mixture = [{"name": name, "weight": weight} | sources[name] for name, weight in weights.items()]
    data = {"source": "stdlib", "files": [], "path": str(folder / "parts"), "mixture": mixture}
    return tiny_tables(
        folder,
        run=run,
        data=data,
        training={"steps": steps},
        checkpoint={"interval": 2},
        validation={"interval": 3, "windows": 10},
        schedule={"warmup_steps": 2, "name": "constant"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The corpora, and a run of STEPS steps on one rank."""
    folder = tmp_path_factory.mktemp("mixture")
    write_corpora(folder)
    train(1, tables_of(folder, name="one"))
    return folder


def part_folders(folder):
    data = tiny_config(folder, **tables_of(folder, name="one")).data
    return {part.label: Path(corpus.path) for part, corpus in zip(data.mixture, data.corpora())}


def counted(weights, samples):
    total = sum(weights.values())
    return {name: samples * weight / total for name, weight in weights.items()}


def test_what_each_part_has_contributed_is_in_the_metrics(folder):
    tables = tables_of(folder, name="one")
    for name, count in counted(WEIGHTS, STEPS * BATCH).items():
        tokens = metrics(tables, f"data/{name}/tokens")
        assert sorted(tokens) == list(range(1, STEPS + 1))
        assert abs(tokens[STEPS] - count * T) <= 2 * T
        part = json.loads((part_folders(folder)[name] / "manifest.json").read_text())
        available = part["splits"]["train"]["tokens"]
        assert metrics(tables, f"data/{name}/epochs")[STEPS] == tokens[STEPS] / available
        of_part = metrics(tables, f"validation/{name}/loss")
        assert sorted(of_part) == [3, 6]
    assert sum(metrics(tables, f"data/{name}/tokens")[STEPS] for name in WEIGHTS) == STEPS * 512
    whole = metrics(tables, "validation/loss")[STEPS]
    shares = counted(WEIGHTS, 1)
    losses = {name: metrics(tables, f"validation/{name}/loss")[STEPS] for name in WEIGHTS}
    assert whole == pytest.approx(sum(losses[name] * shares[name] for name in WEIGHTS))
    assert losses["fox"] < losses["tokens"]


def test_two_ranks_train_on_the_same_windows(folder):
    tables = tables_of(folder, name="two")
    train(2, tables)
    one = tables_of(folder, name="one")
    for name in ("train/loss", "validation/loss", "validation/fox/loss", "validation/noise/loss"):
        assert metrics(tables, name) == pytest.approx(metrics(one, name), rel=1e-5)


def test_a_run_goes_on_exactly_and_says_which_weights_have_changed(folder):
    tables = tables_of(folder, name="resumed", steps=4)
    train(2, tables)
    tables = tables_of(folder, name="resumed")
    assert "changed   training.steps 4 -> 6" in listen(1, tables)
    assert metrics(tables) == pytest.approx(metrics(tables_of(folder, name="one")), rel=1e-5)
    heavy = {"fox": 0.5, "noise": 4, "tokens": 0.2}
    said = listen(1, tables_of(folder, heavy, steps=12, name="resumed"))
    assert "changed   weight of noise in data.mixture 0.3 -> 4\n" in said
    assert "weight of fox" not in said and "epoch 2 of noise begins" in said
    expected = Shares(list(WEIGHTS.values()), 0, [0, 0, 0]).counts(STEPS * BATCH)
    saved = read(run_folder_of(tables) / "checkpoints" / "step-00000012")
    assert saved.shares == Shares(list(heavy.values()), STEPS * BATCH, expected)
    last = saved.shares.counts(12 * BATCH)
    for name, count in zip(WEIGHTS, last):
        assert metrics(tables, f"data/{name}/tokens")[12] == count * T
    assert last[1] - expected[1] > 70
    again = listen(1, tables_of(folder, heavy, steps=14, name="resumed"))
    assert "weight of" not in again


@pytest.mark.parametrize("order", [["fox", "tokens"], ["noise", "fox", "tokens"]])
def test_other_parts_are_another_run(folder, order):
    weights = {name: WEIGHTS[name] for name in order}
    config = tiny_config(folder, **tables_of(folder, weights, name="one"))
    with pytest.raises(UserError, match="trained on other tokens .* parts of data.mixture"):
        prepare_run(config, 1, 1)


def test_a_plan_has_the_epochs_of_each_part(folder):
    config = config_from_tables(tables_of(folder, name="one"), "in a test")
    text = "\n".join(plan_in_words(plan_run(config, 1, 0)))
    for path in part_folders(folder).values():
        assert path.parent == folder / "parts" and f"epochs of {path}" in text
