"""Trials that are trained together have the losses of the trainer's own runs."""

import numpy as np
import pytest
import torch

from tests.measurements.trials_together import Text, train_together
from tests.support.tiny import metrics, tiny_tables, train, write_text
from torchmars.config.load import config_from_tables

OPTIONS = {"equilibrate": True, "renormalize": True}
MATRICES = {"matrix_dtype": "bfloat16", "weight_decay": 0.1, "lr": 1e-3}
OPTIMIZERS = {
    "muon": {"name": "muon", **MATRICES, **OPTIONS},
    "mars-m": {"name": "mars-m", "gamma": 0.1, "betas": [0.9, 0.99], **MATRICES},
    "no-clip": {"name": "mars-m", "gamma": 0.2, "clip": 0, **MATRICES, **OPTIONS},
    "mars-shampoo": {"name": "mars-shampoo", **MATRICES},
    "mars-adamw": {"name": "mars-adamw", "lr": 1e-3, "gamma": 0.2},
    "adamw": {"name": "adamw", "lr": 1e-3},
}
# Products in bfloat16 round otherwise in a batch of matrices.
TOLERANCES = {"adamw": 2e-6, "mars-adamw": 2e-6}


def tables_of(folder, name):
    tables = tiny_tables(
        folder,
        run={"name": name, "seed": len(name)},
        optimizer=OPTIMIZERS[name],
        training={"steps": 8},
        validation={"interval": 2, "windows": 5},
    )
    tables["data"]["tokenizer"] = "bytes"
    tables["schedule"] |= {"gamma": "linear", "final_gamma": 0.3} if name == "mars-m" else {}
    return tables


def tokens_of(folder, split):
    parts = [np.fromfile(each, np.uint16) for each in sorted(folder.glob(f"{split}-*.bin"))]
    return torch.from_numpy(np.concatenate(parts).astype(np.int16))


def test_the_losses_are_those_of_the_trainer(tmp_path):
    write_text(tmp_path)
    runs = {name: tables_of(tmp_path, name) for name in OPTIMIZERS}
    train(1, *runs.values())
    shards = tmp_path / "shards"
    text = Text(*(tokens_of(shards, split) for split in ("train", "validation")), vocab_size=257)
    configs = [config_from_tables(tables, name) for name, tables in runs.items()]
    curves = train_together(configs, text, torch.device("cpu"))
    for (name, tables), curve in zip(runs.items(), curves):
        expected = metrics(tables, "validation/loss")
        assert dict(curve) == pytest.approx(expected, abs=TOLERANCES.get(name, 1e-3)), name
