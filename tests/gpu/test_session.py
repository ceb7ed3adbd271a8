"""The commands of `tests/gpu/session.sh` run in small, and none can last for longer."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from tests.gpu import gaps, session
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from torchmars.cluster import connection

STARTS_PROCESSES = {"endings", "tests", "as it is", "deterministic", "layouts", "copies"}
# Other tests have runs that are stopped, saved and repeated.
OF_WHOLE_RUNS = ["endings", "as it is", "copies"]
PARTS = [(number, part) for number, parts in session.COMMANDS.items() for part in parts]


def measured(numbers, folder):
    connection.stop()
    del os.environ["RANK"]  # a process that nobody has started as a rank
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # to compile takes a minute
    os.chdir(folder)
    for number, part in numbers:
        session.measure(number, session.COMMANDS[number][part], folder / f"gpu-{number}.jsonl")


def rows_of(folder):
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_a_command_takes_at_most_nine_minutes():
    for parts in session.COMMANDS.values():
        assert sum(part.seconds for part in parts) <= 9 * 60 - 5 * len(parts)  # to import torch
    assert sum(part.seconds for part in session.COMMANDS[7]) <= 225


def test_gaps_are_named_by_what_the_host_did():
    def event(name, start, end, parent=None):
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=times, cpu_parent=parent)

    kernels = [(0, 10, "a"), (4, 12, "b"), (5, 6, "c"), (30, 31, "d"), (31, 33, "e"), (93, 95, "f")]
    busy, found = gaps.gaps_between(reversed(kernels))
    assert busy == 12 + 3 + 2
    assert found == [(12, 30, "b", "d"), (33, 93, "e", "f")]
    step = event("step", 0, 40)
    inner = event("kernel", 14, 28, parent=step)
    host = gaps.Host([inner, step, event("later", 60, 70)])
    assert host.during(12, 30) == "step > kernel"
    assert host.during(28, 50) == "step"
    assert host.during(33, 93) == gaps.BETWEEN == gaps.Host([]).during(0, 1)


def test_a_part_is_ended_after_its_seconds():
    assert session.run_part([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert session.run_part([sys.executable, "-c", "import time; time.sleep(600)"], 0.2) is None


@FULL
def test_parts_of_one_process_measure(tmp_path):
    here = [
        (number, place)
        for number, parts in session.COMMANDS.items()
        for place, part in enumerate(parts)
        if part.name not in STARTS_PROCESSES
    ]
    run_ranks(measured, 1, here, tmp_path)
    assert {row["part"] for row in rows_of(tmp_path)} == {
        part.name for _, part in PARTS if part.name not in STARTS_PROCESSES
    }


@pytest.mark.parametrize("name", full_but([], ["layouts", *OF_WHOLE_RUNS], OF_WHOLE_RUNS))
def test_parts_that_start_processes_measure(tmp_path, name):
    [(number, part)] = [each for each in PARTS if each[1].name == name]
    session.measure(number, part, tmp_path / "rows.jsonl")
    rows = rows_of(tmp_path)
    assert all(row.get("exit code") == row.get("expected") for row in rows), rows
    assert all(row.get("largest relative difference", 0) < 1e-4 for row in rows), rows
    assert all(row.get("same checkpoint", True) for row in rows), rows
