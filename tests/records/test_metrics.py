"""What a run writes about itself."""

import json
import math
import os

import pytest
import torch

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_tables, train_here, write_text
from torchmars.records import speed
from torchmars.records.lines import Journal
from torchmars.records.metrics import Metrics
from torchmars.records.speed import Throughput


def open_metrics(config, step=0, ranks=1, flops_per_token=100):
    """The metrics of a run on the CPU, as on its first rank."""
    config.run.path.mkdir(parents=True, exist_ok=True)
    device, tokens = (
        torch.device("cpu"),
        config.training.global_batch_size * config.training.seq_len,
    )
    journal = Journal(config.run.path / "metrics.jsonl")
    journal.rewind(step, True)
    speed = Throughput(step, tokens, flops_per_token, device, ranks)
    return Metrics(journal, [], speed, config.training.steps, device)


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    config = tiny_config(tmp_path)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "train/loss": 1.0}) for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6, "tra')
    writer = open_metrics(config, step=3)
    writer.train(4, loss=2.0, bits=math.nan, lr=0.1, telemetry={"grad_norm": 0.5})
    writer.close()
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 2, 3, 4] and written[3]["train/loss"] == 2.0


def test_throughput_leaves_pauses_out(tmp_path, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    writer = open_metrics(tiny_config(tmp_path))
    now[0] += 4
    with writer.throughput.paused():
        now[0] += 50
    writer.train(2, loss=2.0, bits=math.nan, lr=0.1, telemetry={"grad_norm": 0.5})
    line = capsys.readouterr().out
    assert (
        "256 tok/s" in line and "eta 0:00:36" in line
    )  # 16 x 32 tokens in each of two steps of 2 s; 18 to come


def test_mfu_is_known_where_the_device_is(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    writer = open_metrics(tiny_config(tmp_path), ranks=2, flops_per_token=1000)
    writer.throughput.peak_flops = 2e6
    now[0] = 1.0
    writer.train(1, loss=2.0, bits=math.nan, lr=0.1, telemetry={"grad_norm": 0.5})
    assert "mfu 25.6%" in capsys.readouterr().out  # 512 tokens/s x 1000 FLOP of 2 x 10^6


def run_with_wandb(tables):
    os.environ["WANDB_MODE"] = "offline"
    train_here(tables)


@FULL
def test_tensorboard_and_wandb_offline(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_text(tmp_path)
    run_ranks(
        run_with_wandb,
        1,
        tiny_tables(tmp_path, training={"steps": 3}, metrics={"tensorboard": True, "wandb": True}),
    )
    run = tmp_path / "runs" / "tiny"
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
