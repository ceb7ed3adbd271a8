"""Files and folders that are deleted while a run lasts begin anew."""

import shutil

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    AtReport,
    metrics,
    run_folder_of,
    steps_kept,
    tiny_tables,
    train_here,
    write_text,
)
from torchmars.records.events import EVENTS_FILE, read_events


def with_deletions(tables):
    """Train; files and folders are gone after step 6."""
    folder = run_folder_of(tables)

    def delete_after_6(trainer):
        def delete():
            # The save of step 4 may still run, and a folder that is being filled cannot be deleted.
            trainer.checkpointer.saver.thread.join()
            (folder / "metrics.jsonl").rename(folder / "elsewhere")
            (folder / EVENTS_FILE).unlink()
            shutil.rmtree(folder / "checkpoints")

        trainer.metrics.trackers.append(AtReport(6, delete))

    train_here(tables, change=delete_after_6)


def test_what_is_deleted_begins_anew(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, metrics={"log_interval": 2}, checkpoint={"interval": 4})
    run_ranks(with_deletions, 1, tables)
    folder = run_folder_of(tables)
    assert list(metrics(tables)) == [*range(8, 21, 2)] and steps_kept(tables) == [8, 12, 16, 20]
    assert (folder / "elsewhere").read_text().count("train/loss") == 4
    assert [each.step for each in read_events(folder / EVENTS_FILE)] == [8, 12, 16, 20, 20]
