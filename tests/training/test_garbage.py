"""Python collects garbage where a run reports, and nowhere else."""

import gc
import weakref

from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, train_here, write_text


class Cycle:
    """An object that only the collection frees."""

    def __init__(self):
        self.own = self


def collections(tables):
    """After which steps garbage was collected, and how many were alive of objects, one a step."""
    steps, alive, cycles = [], [], []

    def change(trainer):
        plain = trainer.train_step

        def train_step():
            if not gc.callbacks:
                gc.callbacks.append(count)
            made = plain()
            _ = [[] for _ in range(2000)]  # more than what Python lets pass
            cycles.append(weakref.ref(Cycle()))
            alive.append(sum(each() is not None for each in cycles))
            return made

        def count(phase, info):
            if phase == "start":
                steps.append(trainer.state.step)

        trainer.train_step = train_step

    train_here(tables, change=change)
    gc.callbacks.clear()
    return steps, alive, gc.isenabled(), gc.get_freeze_count()


def test_garbage_is_collected_at_reports_only(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 12}, metrics={"log_interval": 5})
    ((steps, alive, enabled, frozen),) = run_ranks(collections, 1, tables)
    assert [step for step in steps if step < 12] == [1, 5, 10]
    assert alive == [1, 1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2]
    assert enabled and frozen == 0
