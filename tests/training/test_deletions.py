"""Files and folders that are deleted while a run goes on: it says so, and begins them anew."""

import shutil

from tests.support.tiny import (
    metrics,
    run_folder_of,
    steps_kept,
    tiny_tables,
    train_here,
    write_text,
)
from torchmars.metrics.events import EVENTS_FILE, read_events
from torchmars.training.trainer import Trainer


def test_what_is_deleted_is_said_once_and_begins_anew(tmp_path, monkeypatch, capfd):
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path, metrics={"log_interval": 2}, checkpoint={"interval": 4, "async_save": False}
    )
    folder, report = run_folder_of(tables), Trainer.report
    names = ("metrics.jsonl", "checkpoints", EVENTS_FILE)

    def then_delete(self, *made):
        report(self, *made)
        if self.state.step == 6:
            (folder / "metrics.jsonl").rename(folder / "elsewhere")
            (folder / EVENTS_FILE).unlink()
            shutil.rmtree(folder / "checkpoints")

    monkeypatch.setattr(Trainer, "report", then_delete)
    train_here(tables)
    said = capfd.readouterr().err
    for name in names:
        line = f"warning: {folder / name} was deleted or moved while the run went on"
        assert said.count(line) == 1
    assert list(metrics(tables)) == [*range(8, 21, 2)] and steps_kept(tables) == [8, 12, 16, 20]
    assert (folder / "elsewhere").read_text().count("train/loss") == 4
    events = read_events(folder / EVENTS_FILE)
    assert {each.facts["what"]: each.step for each in events if each.kind == "deleted"} == {
        name: 8 for name in names
    }
    assert events[-1].kind == "complete"
