"""Files and folders that are deleted while a run lasts: it says so, and begins them anew."""

import contextlib
import io
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

NAMES = ("metrics.jsonl", "checkpoints", EVENTS_FILE)


def with_deletions(tables):
    """Train; files and folders are gone after step 6. What this rank prints on stderr."""
    folder = run_folder_of(tables)

    def delete_after_6(trainer):
        def delete():
            # The save of step 4 may still run, and a folder that is being filled cannot be deleted.
            trainer.checkpointer.saver.thread.join()
            (folder / "metrics.jsonl").rename(folder / "elsewhere")
            (folder / EVENTS_FILE).unlink()
            shutil.rmtree(folder / "checkpoints")

        trainer.metrics.trackers.append(AtReport(6, delete))

    with contextlib.redirect_stderr(io.StringIO()) as said:
        train_here(tables, change=delete_after_6)
    return said.getvalue()


def test_what_is_deleted_is_said_once_and_begins_anew(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, metrics={"log_interval": 2}, checkpoint={"interval": 4})
    [said] = run_ranks(with_deletions, 1, tables)
    folder = run_folder_of(tables)
    for name in NAMES:
        line = f"warning: {folder / name} was deleted or moved while the run went on"
        assert said.count(line) == 1
    assert list(metrics(tables)) == [*range(8, 21, 2)] and steps_kept(tables) == [8, 12, 16, 20]
    assert (folder / "elsewhere").read_text().count("train/loss") == 4
    events = read_events(folder / EVENTS_FILE)
    assert {each.facts["what"]: each.step for each in events if each.kind == "deleted"} == {
        name: 8 for name in NAMES
    }
    assert events[-1].kind == "complete"
