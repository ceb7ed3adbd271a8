"""Traces of steps, and what becomes of memory that does not suffice."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny import listen_here, metrics, run_folder_of, tiny_tables, train, write_text
from torchmars import train as rank
from torchmars.cluster import connection
from torchmars.cluster.failures import FALLOUT_MESSAGE
from torchmars.config import ProfilerConfig
from torchmars.training.profiler import Profiler


def traced_steps(file):
    """The steps that a trace has, and how many operators."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    steps = {int(name[5:]) for name in names if re.fullmatch(r"step \d+", name)}
    return steps, sum(name.startswith("aten::") for name in names)


def listen_to_each(*runs):
    return [listen_here(tables) for tables in runs]


def test_a_trace_of_steps_on_every_rank(tmp_path):
    write_text(tmp_path)
    settings = {"training": {"steps": 5}}
    plain = tiny_tables(tmp_path, run={"name": "plain"}, **settings)
    profiler = {"start": 3, "steps": 2, "memory": True}
    traced = tiny_tables(tmp_path, run={"name": "traced"}, profiler=profiler, **settings)
    profiler = {"start": 1, "steps": 9}  # the run ends before
    cut = tiny_tables(tmp_path, run={"name": "cut"}, profiler=profiler, training={"steps": 2})
    folder = run_folder_of(traced) / "profile"
    folder.mkdir(parents=True)
    (folder / "steps-3-to-4-rank-0.json.gz").symlink_to(tmp_path / "mine")  # is not followed
    [_, said, _], _ = run_ranks(listen_to_each, 2, plain, traced, cut)
    assert not (tmp_path / "mine").exists()
    assert f"profile   {folder}/steps-3-to-4-rank-0.json.gz\n" in said
    assert sorted(file.name for file in folder.iterdir()) == [
        f"steps-3-to-4-rank-{number}.json.gz" for number in range(2)
    ]
    for file in folder.iterdir():
        steps, operators = traced_steps(file)
        assert steps == {3, 4} and operators > 100
    [first, _] = sorted((run_folder_of(cut) / "profile").iterdir())
    assert traced_steps(first)[0] == {1, 2}
    assert not (run_folder_of(plain) / "profile").exists()
    assert metrics(traced) == metrics(plain)


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, profiler={"start": 1, "steps": 1}, training={"steps": 2})
    run_folder_of(tables).mkdir(parents=True)
    (run_folder_of(tables) / "profile").write_text("in the way")
    train(1, tables)
    assert list(metrics(tables)) == [1, 2]


class Place:
    """What a profiler asks of a layout: here of rank 1, on a GPU."""

    device = torch.device("cuda", 0)

    class world:  # noqa: N801
        rank = 1


def test_a_snapshot_of_a_gpu(tmp_path, monkeypatch, capsys):
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: Path(file).touch())
    config = ProfilerConfig(memory=True)
    with pytest.raises(torch.OutOfMemoryError), Profiler(config, tmp_path, Place()) as profiler:
        for number in (1, 2, 3):
            with profiler.step(number):
                if number == 3:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
    [file] = tmp_path.iterdir()
    assert file.name == "memory-out-of-memory-rank-1.pickle"
    assert capsys.readouterr().out == f"profile   {file}\n"
    assert list(calls[0]) == ["max_entries"] and calls[1:] == [{"enabled": None}]


def test_memory_that_does_not_suffice_is_one_line(tmp_path, monkeypatch, capsys):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
        )

    monkeypatch.setattr(rank.process, "follow_launcher", lambda: None)
    monkeypatch.setattr(rank, "keep_compiled_in", lambda folder: None)
    monkeypatch.setattr(connection, "open_store", out_of_memory)
    monkeypatch.setattr(rank, "end_at_once", sys.exit)
    args = ["quickstart.toml", "--run.folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train", *args])
    with pytest.raises(SystemExit) as ended:
        rank.main()
    err = capsys.readouterr().err
    assert ended.value.code == 1 and err.count("\n") == 1
    assert "ran out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB.): lower" in err
    assert not FALLOUT_MESSAGE.search(f"LoneMistake: {err}")
