"""Sizes of a model that are tuned side by side: names, and the command."""

import json

import pytest

from tests.comparison.conftest import start_quickly
from torchmars.comparison import local
from torchmars.comparison.sizes import find_sizes
from torchmars.config.load import validate
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES

LLAMA = {"name": "llama", "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "n_inner": 64}


def config_with(**tables):
    return validate([("in a test", {"model": LLAMA, "optimizer": {"name": "adamw"}} | tables)])


def test_widths_have_the_least_depth_and_depths_the_least_width():
    config = config_with(transfer={"n_embd": 16, "depth": "1/L"})
    base, sizes = find_sizes(config, [32, 64], [2, 4], without=True)
    assert [size.name for size in sizes] == [
        *("width32-depth2", "width64-depth2", "width64-depth2-without"),
        *("width32-depth4", "width32-depth4-without"),
    ]
    shape = {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 32, "n_inner": 64}
    for size in sizes:
        own = {key: size.sections["model"][key] for key in shape}
        factor = 2 if "width64" in size.name else 1
        grown = {key: factor * value for key, value in shape.items()}
        assert own == grown | {"n_layer": 4 if "depth4" in size.name else 2}
        named = size.sections["transfer"]
        if "without" in size.name:
            assert not named.keys() & shape.keys()
        else:
            assert named["depth"] == "1/L" and shape.items() <= named.items()
    assert base.model.n_embd == base.transfer.n_embd == 32


def test_a_width_that_is_no_multiple_of_a_head_is_one_line():
    with pytest.raises(
        UserError,
        match=r"width 40 is 1\.25 times 32, .* would be 2\.5: choose multiples of 16",
    ):
        find_sizes(config_with(), [32, 40], [], without=False)


@pytest.fixture
def transfer(call, config, monkeypatch):
    """Runs `torchmars transfer tiny.toml ARGS`."""
    monkeypatch.setattr(local, "start_process", start_quickly)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return lambda *args: call("transfer", config, *args)


def test_mistakes_are_one_line(transfer, tmp_path):
    widths = ("--widths", "32,64")
    for args, wrong in [
        ((), "name two sizes or more"),
        (("--widths", "64"), "name two sizes or more"),
        (("--widths", "64,many"), "--widths must be a valid integer, got 'many'"),
        (("--widths", "0,64"), "--widths must be greater than or equal to 1, got 0"),
        (widths, "--lr-grid is missing: give the learning rates to try"),
        ((*widths, "--lr-grid", "1,x"), "--lr-grid must be a valid number, got 'x'"),
        ((*widths, "--lr-grid", "1,2", "--validation.interval", "0"), "validation.interval = 0"),
        ((*widths, "--lr-grid", "1", "--widen"), "--widen needs two learning rates or more"),
        ((*widths, "--lr-grid", "1", "--checkpoint.folder", "c"), "checkpoint.folder has no meani"),
        ((*widths, "--lr-grid", "0,2"), "optimizer.lr must be more than 0"),
        ((*widths, "--lr-grids", "1,2"), "--lr-grids 1,2: did you mean --lr-grid?"),
    ]:
        code, out, err = transfer(*args)
        assert code == 2 and not out and err.count("\n") == 1 and wrong in err, (args, err)
    assert not (tmp_path / "transfers").exists()


def test_check_tells_by_its_exit_code(transfer, monkeypatch):
    args = ["--widths", "64,128,256", "--check", "--optimizer.name", "adamw"]
    args += ["--optimizer.lr", "3e-3", "--without"]
    code, out, err = transfer(*args)
    assert code == 0 and not err and "Sizes stay the same: learning rates transfer." in out
    assert "after 4 steps, without" in out and " !" in out  # of what is not transferred
    adamw = RULES["adamw"]
    monkeypatch.setattr(type(adamw), "lr_factor", lambda *_: 1.0)  # as if the matrices' rate stayed
    code, out, _ = transfer(*args)
    assert code == 1 and "learning rates may not transfer" in out


def test_the_base_needs_no_name(transfer):
    args = ["--depths", "2,4", "--check", "--optimizer.name", "adamw", "--model.n_embd", "64"]
    args += ["--transfer.depth", "1/L", "--transfer.decay", "coupled"]
    code, out, err = transfer(*args)
    assert code == 0 and not err and "Sizes stay the same" in out
    assert transfer(*args, "--transfer.n_embd", "32") == (code, out, err)  # nor does it count


def test_training_needs_a_config(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("transfer", "--widths", "64,128", "--lr-grid", "1")
    assert code == 2 and err.startswith("error: no config is named: torchmars transfer")
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_every_size_is_tuned_and_the_command_resumes(transfer, tmp_path):
    args = ["--widths", "32,64", "--lr-grid", "1e-3,4e-3,1.6e-2", "--seeds", "2"]
    args += ["--without", "--jobs", "2", "--optimizer.name", "adamw"]
    code, out, err = transfer(*args)
    assert code == 0, err
    folder = tmp_path / "transfers" / "tiny"
    found = json.loads((folder / "results.json").read_text())
    names = ["width32", "width64", "width64-without"]
    table = out[out.index("best rate") : out.index("trials: ")].splitlines()
    assert [line.split()[0] for line in table if line.startswith("width")] == names
    assert f"torchmars plot {folder.relative_to(tmp_path)} --html" in out
    first = [each for each in found["trials"] if each["seed"] == 0]
    assert [each["contender"] for each in first] == [name for name in names for _ in range(3)]
    others = {name: 0 for name in names}
    for each in found["trials"]:
        others[each["contender"]] += each["seed"] == 1
    assert all(2 <= count <= 3 for count in others.values())  # the best and its neighbours
    table = (folder / "table.md").read_text()
    assert "at the base's rate" in table and (folder / "plot.svg").exists()
    logs = sorted(folder.glob("trials/*/metrics.jsonl"))
    before = [log.stat().st_mtime_ns for log in logs]
    assert transfer(*args)[0] == 0
    assert [log.stat().st_mtime_ns for log in logs] == before
    code, _, err = transfer("--widths", "16,32", "--lr-grid", "1e-3", "--optimizer.name", "adamw")
    assert code == 2 and "has a comparison with other settings: " in err
