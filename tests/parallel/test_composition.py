"""One loss, however parallelisms compose: every gradient of a run is compared with float64."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.measurements import composition
from tests.support.composition import drawn, judged, refusal, why_not
from tests.support.full import FULL
from tests.support.tiny import write_text


def day():
    """FUZZ_DATE, or the day of this commit: a number such as 20261128; 0 without git."""
    if given := os.environ.get("FUZZ_DATE"):
        return int(given)
    command = ["git", "log", "-1", "--format=%cd", "--date=format:%Y%m%d"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return 0
    return int(found.stdout.strip() or 0)


def groups():
    """The numbers of the draws of each test: `FUZZ_SEED` has that of the only one."""
    if number := os.environ.get("FUZZ_SEED"):
        return [pytest.param([int(number)], id=number)]
    tens = [range(begin, begin + 10) for begin in range(0, 200, 10)]
    of_day = [[1000 * day() + number for number in numbers] for numbers in tens]
    return [
        pytest.param(FIXED, id="fixed"),
        *(pytest.param(of_day[n], marks=FULL, id=f"full-{n}") for n in range(3)),
        *(pytest.param([*each], marks=pytest.mark.slow, id=f"slow-{each[0]}") for each in tens),
    ]


FIXED = [1, 40, 47, 72, 185, 197]  # each family and each axis is in one of them
CASES, FAULTY = composition.CASES, [row for row in composition.ROWS if row.fault]


@pytest.mark.parametrize("numbers", groups())
def test_draws_are_one_loss_or_refused_for_their_cause(numbers, tmp_path):
    """Repeat one by FUZZ_SEED=its number."""
    write_text(tmp_path, documents=60, words=100)
    wrong, trained = {}, {}
    for number in numbers:
        draw = drawn(tmp_path, number)
        for run in range(len(draw.runs)):
            why, said = why_not(draw, run), refusal(draw, run)
            if bool(said) != bool(why) or said and not any(each in said for each in why):
                wrong[number] = f"told {said!r}, because of {why}"
            if said:  # what begins with it cannot be trained
                draw = draw._replace(runs=draw.runs[:run])
                break
        if draw.runs:
            trained[number] = draw
    for number, found in zip(trained, judged([*trained.values()])):
        print(number, found)
        if found.problems:
            wrong[number] = found.problems
    assert not wrong, "\n".join(f"FUZZ_SEED={number}: {each}" for number, each in wrong.items())


@FULL
@pytest.mark.parametrize("name", CASES)
def test_each_case_of_the_table_is_one_loss(name, tmp_path):
    write_text(tmp_path, documents=60, words=100)
    found = composition.judge_case(tmp_path, name)
    assert not found.problems and not found.tied, found.problems


@FULL
@pytest.mark.parametrize("row", FAULTY, ids=composition.fault_of)
def test_a_fault_is_found(row, tmp_path):
    write_text(tmp_path, documents=60, words=100)
    found = composition.judge_case(tmp_path, row.case, row.fault)
    assert found.problems and found.worst[row.figure] > 1e-4, found


def test_the_page_has_the_table_of_the_records():
    records = json.loads(composition.RECORDS.read_text())
    assert composition.table(records) in composition.PAGE.read_text()
