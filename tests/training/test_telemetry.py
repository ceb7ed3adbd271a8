"""The optimizer's numbers in metrics.jsonl are those of the whole gradients."""

import json

import pytest
from torch.distributed.tensor import DTensor

from tests.optim.numbers import numbers_apart
from tests.support.ranks import run_ranks
from tests.support.tiny import run_folder_of, tiny_tables, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer

STEPS = 3
OTHERS = {"loss", "bits_per_byte", "tokens_per_second", "memory_gib"}


def record(*runs):
    """Train `runs`, given as tables; return for each its groups and its gradients by step."""
    return [record_run(tables) for tables in runs]


def record_run(tables):
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    optimizer, gradients = trainer.optimizer, []

    def record_gradients(*_):
        gradients.append(
            [[whole(p.grad) for p in group["params"]] for group in optimizer.param_groups]
        )

    optimizer.register_step_pre_hook(record_gradients)
    trainer.run()
    keys = ("role", "rule", "betas", "gamma", "clip", "lr")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups], gradients


def whole(gradient):
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


@pytest.fixture(scope="module")
def tables_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("telemetry")
    write_text(folder)

    def tables(name, **parallelism):
        return tiny_tables(
            folder,
            run={"name": name},
            training={"steps": STEPS},
            # Between the norms of the tensors: some are clipped.
            optimizer={"name": "mars-m", "clip": 0.2, "matrix_dtype": "float32"},
            parallelism=parallelism,
        )

    return tables


def test_every_number_of_a_run_is_that_of_whole_gradients(tables_of):
    one, fsdp, tp = tables_of("one"), tables_of("fsdp"), tables_of("tp", tp=2)
    found = [*run_ranks(record, 1, one)[0], *run_ranks(record, 2, fsdp, tp)[0]]
    for tables, (groups, gradients) in zip((one, fsdp, tp), found):
        metrics = run_folder_of(tables) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [line for line in lines if "train/loss" in line]
        assert len(lines) == len(gradients) == STEPS
        for number, line in enumerate(lines, start=1):
            expected = numbers_apart(groups, gradients[:number], 1.0) | {"tokens": number * 16 * 32}
            said = {
                key.removeprefix("train/"): value
                for key, value in line.items()
                if key.startswith("train/") and not key.endswith("_ms")
            }
            assert said.keys() - expected.keys() <= OTHERS | {"lr"}
            assert {key: said[key] for key in expected} == pytest.approx(expected, rel=1e-4)
        assert said["lr"] == pytest.approx(groups[0]["lr"])
        assert 0 < said["matrix/clipped"] < 1
