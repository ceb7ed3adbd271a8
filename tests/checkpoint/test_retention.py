"""Which checkpoints of a run are kept."""

from tests.support.tiny import metrics, steps_kept, tiny_tables, train, write_text
from torchmars.checkpoint.upkeep import steps_to_delete
from torchmars.config import CheckpointConfig


def test_what_is_kept():
    def going(steps, losses=None, **settings):
        return steps_to_delete(steps, losses or {}, CheckpointConfig(**settings))

    steps = list(range(100, 1100, 100))
    assert going(steps, keep_last=0) == []
    assert going(steps, keep_last=2, keep_best=False) == steps[:-2]
    assert going(steps, keep_last=1, keep_every=500) == [100, 200, 300, 400, 600, 700, 800, 900]
    losses = {100: 3.0, 300: 2.0, 400: 2.0, 500: float("nan")}
    assert going(steps, losses, keep_last=1) == [100, 200, 400, 500, 600, 700, 800, 900]
    assert going(steps, losses, keep_last=1, keep_best=False) == steps[:-1]


def test_a_run_keeps_what_it_is_told_to(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path,
        training={"steps": 12},
        checkpoint={"interval": 2, "keep_last": 2, "keep_every": 6},
        validation={"interval": 2, "windows": 4},
    )
    train(1, tables)
    losses = metrics(tables, "validation/loss")
    assert min(losses, key=losses.get) == 12  # so the best is among the last
    assert steps_kept(tables) == [6, 10, 12]
    tables["schedule"] = {"warmup_steps": 0, "name": "constant"}
    tables["optimizer"]["lr"], tables["training"]["steps"], tables["checkpoint"]["keep_every"] = (
        0.5,
        20,
        0,
    )
    train(1, tables)  # a rate that makes it worse
    losses = metrics(tables, "validation/loss")
    best = min(losses, key=losses.get)
    assert best == 12 and steps_kept(tables) == [12, 18, 20]
