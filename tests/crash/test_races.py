"""Races of two runs for one folder of checkpoints: one ends whole, the other with one line."""

import contextlib
import time

import pytest

from tests.support.commands import start_run
from tests.support.store import BUCKET, s3_server
from tests.support.tiny import tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import checkpoints, leftovers, step_of
from torchmars.checkpoint.resume import read_verified
from torchmars.config.load import config_from_tables
from torchmars.core.places import place

STEPS = 24
# Seconds after which the second of two runs starts.
OFFSETS = (0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "store"])
def test_of_two_runs_in_one_folder_one_loses_nothing(tmp_path, where):
    if where == "store":
        pytest.importorskip("moto")
        pytest.importorskip("s3fs")
    write_text(tmp_path)
    lost, tracebacks = [], []
    with s3_server() if where == "store" else contextlib.nullcontext():
        for number, offset in enumerate(OFFSETS):
            there = f"s3://{BUCKET}/{number}" if where == "store" else tmp_path / f"there-{number}"
            said = race(tmp_path, number, str(there), offset)
            tracebacks += [text for _, text in said if "Traceback" in text]
            lost += losses(place(str(there)), said)
            print(number, offset, [code for code, _ in said], len(lost), len(tracebacks))
    assert not lost and not tracebacks


def race(folder, number, there, offset):
    """Run two configs that differ by their seed; the exit code and output of each."""
    commands = []
    for seed in (1, 2):
        tables = tiny_tables(
            folder,
            run={"name": f"{number}-{seed}", "seed": seed},
            training={"steps": STEPS},
            checkpoint={"interval": 2, "keep_last": 0, "keep_best": False, "folder": there},
        )
        file = folder / f"{number}-{seed}.toml"
        write_config(config_from_tables(tables, "in a test"), file)
        commands.append(start_run(file, ranks=1, NGPU="1"))
        time.sleep(offset if seed == 1 else 0.0)
    outputs = [command.communicate() for command in commands]
    return [(command.returncode, "".join(out)) for command, out in zip(commands, outputs)]


def losses(there, said):
    """What was lost in a race: of checkpoints, or of the one line that ends the other run."""
    lost = []
    if sorted(code for code, _ in said) != [0, 2]:
        lost.append(f"ended with {said}")
    winner = [code for code, _ in said].index(0) if 0 in (code for code, _ in said) else 0
    found = {step_of(path): path for path in checkpoints(there)}
    lost += [step for step in range(2, STEPS + 1, 2) if step not in found]
    for path in found.values():
        if read_verified(path, "full").config["run"]["seed"] != winner + 1:
            lost.append(f"{path} is of the other run")
    lost += [path for path in leftovers(there)]
    code, text = said[1 - winner]
    if text.count("error: ") != 1 or "could not be written" in text + said[winner][1]:
        lost.append(text)
    return lost
