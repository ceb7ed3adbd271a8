"""torchmars plan --find: which layouts it plans and names, and what it says where none fits."""

import math
from dataclasses import replace

import pytest
import torch

from tests.planning.test_exact import ROWS
from tests.support.full import full_but
from tests.support.tiny import tiny_tables
from torchmars.config.load import config_from_tables, load_config
from torchmars.core.errors import UserError
from torchmars.planning.find import find_layouts, layout_options, planned
from torchmars.planning.plan import MEMORY

WORLD_SIZE, PER_NODE, GIB = 16, 8, 2**30


def large(folder, **training):
    """A config of 1.2 billion parameters."""
    tables = tiny_tables(
        folder,
        model={"name": "llama", "n_layer": 16, "n_head": 16, "n_embd": 2048, "vocab_size": 32_000},
        training={"global_batch_size": 32, "seq_len": 2048} | training,
    )
    return config_from_tables(tables, "in a test")


def test_every_layout_that_divides_is_planned(tmp_path):
    """What is computed again does not go with compiled blocks and tensor parallelism."""
    config = large(tmp_path, compile=True, global_batch_size=48)
    plans = list(planned(config, 24, PER_NODE))
    degrees = [plan.degrees for plan in plans]
    assert {each.pp for each in degrees} == {1, 2, 3, 4, 6, 8, 12}
    assert {each.tp for each in degrees} == {1, 2}  # two heads of keys and values
    assert {each.cp for each in degrees} == {1, 2} and {each.ep for each in degrees} == {1}
    assert all(math.prod(each[:5]) == 24 for each in degrees)
    modes = {(plan.degrees.tp > 1, plan.mode) for plan in plans}
    assert (True, "full") not in modes and {(False, "full"), (True, "none")} <= modes


def test_the_table(tmp_path):
    """Rows are the fastest that fit, one of each form, in order."""
    config = large(tmp_path)
    heading, *rows, best, speeds = find_layouts(config, WORLD_SIZE, PER_NODE, 20 * GIB)
    assert heading.split() == ["s/step", "GiB", "waiting", "microbatches", "options"]
    times = [float(row.split()[0]) for row in rows]
    assert len(rows) == 8 and times == sorted(times)
    assert all(int(row.split()[1]) <= 12 for row in rows)
    assert best == "the fastest that fits: " + " ".join(rows[0].split()[4:])
    assert "layouts that divide" in speeds and "400 TFLOP/s" in speeds


def test_options_are_what_differs_from_the_config(tmp_path):
    config = large(tmp_path)
    other = replace(
        config, activation_checkpoint=replace(config.activation_checkpoint, mode="full")
    )
    assert layout_options(config, config) == ""
    assert layout_options(other, config) == "--activation_checkpoint.mode full"


def test_nothing_fits(tmp_path):
    with pytest.raises(UserError, match="no layout of --world-size 16 fits --memory 8 GiB.*needs"):
        find_layouts(large(tmp_path), WORLD_SIZE, PER_NODE, 8.2 * GIB)
    with pytest.raises(UserError, match="divides .* training.global_batch_size = 7 .*: change one"):
        find_layouts(large(tmp_path, global_batch_size=7), 256, PER_NODE, 80 * GIB)
    with pytest.raises(UserError, match="--find is for GPUs: set --gpus-per-node"):
        find_layouts(large(tmp_path), WORLD_SIZE, 0, 80 * GIB)


def files_of(row):
    """The files that a row of the table names."""
    return " ".join(each for each in row["args"].split() if each.endswith(".toml"))


FOUND = sorted({(files_of(row), row["ranks"]) for row in ROWS if row["kind"] == "find"})
LONG = [each for each in FOUND if each[1] == 256 and "gpt2" not in each[0]]


@pytest.mark.parametrize("files,ranks", full_but([], FOUND, LONG))
def test_the_named_layout_is_the_best_of_the_exact_ones(files, ranks):
    """Or its exact time is within 5% of the best one's. By its exact peak it fits 80 GiB.

    Where the exact peaks of the smallest layouts leave no room, none is named.
    """
    torch.set_num_threads(1)
    config = load_config(files.split(), "in a test")
    rows = [row for row in ROWS if row["kind"] == "find" and row["ranks"] == ranks]
    rows = [row for row in rows if files_of(row) == files]
    if all(int(row["peak"]) > MEMORY for row in rows):
        with pytest.raises(UserError, match="no layout .* fits --memory 80 GiB"):
            find_layouts(config, int(ranks), PER_NODE, 80 * GIB)
        return
    exact = {
        row["args"].removeprefix(files).strip(): float(row["seconds"])
        for row in rows
        if int(row["peak"]) < 80 * GIB
    }
    *_, named, _ = find_layouts(config, int(ranks), PER_NODE, 80 * GIB)
    options = named.removeprefix("the fastest that fits: ").replace("the config as it is", "")
    assert exact[options] <= 1.05 * min(exact.values())
