"""./run_train.sh as a user runs it: what it prints, and exit codes."""

import os
import re
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SECONDS, Command, finish, finish_run, run_command
from tests.support.damage import flip
from tests.support.full import FULL
from tests.support.tiny import tiny_tables, train
from torchmars.checkpoint import manifest as manifests


def test_a_run_says_what_it_does_then_that_it_is_complete(config, tmp_path):
    """Modules in the folder that it starts from are not taken for Python's or another package's."""
    for name in ("random", "psutil", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    paths = os.environ.get("PYTHONPATH", "")  # as of `PYTHONPATH=$PYTHONPATH:...`, if it was empty
    code, out, err = finish(config, PYTHONPATH=f":{paths}")
    assert code == 0, err
    for part in (
        "2 layers, 2 heads, width 32",
        "FSDP over 2 ranks (cpu, gloo), float32 compute",
        "16 x 32 tokens a step",
        "mars-adamw, approx",
        "embedding  mars-adamw",
        "tokens (bytes); 4 steps read 2,048",
        "step 4/4 | loss",
        "grad norm",
        "tok/s",
        "GiB",
        "validation loss",
        "checkpoint ",
        "sample:",
    ):
        assert part in out
    run = tmp_path / "runs" / "tiny"
    assert out.endswith(
        f"next      torchmars generate {run}\n"
        f"          torchmars plot {run}\n"
        f"          torchmars export {run} {run}-hf\n"
    )
    assert out.count("step 4/4 | loss") == 1  # one rank speaks
    assert "Warning" not in err and "Traceback" not in err


@FULL
def test_its_resolved_config_goes_on_and_each_rank_has_a_log(config, tmp_path):
    code, _, err = finish(config)
    assert code == 0, err
    resolved = tmp_path / "runs" / "tiny" / "config.toml"
    code, out, _ = finish_run(resolved)  # the resolved config describes the same run
    assert code == 0 and "complete  all 4 steps are done" in out
    assert not re.search("^step ", out, re.MULTILINE)
    code, out, _ = finish_run(config, "--training.steps", "6", LOG_RANK="0,1", SLURMD_NODENAME="n1")
    assert code == 0 and "n1 rank 0 | continue  from step 4" in out and "step 6/6 | loss" in out
    logs = [
        file.read_text()
        for file in sorted((tmp_path / "runs" / "tiny" / "logs").glob("rank-*.log"))
    ]
    assert len(logs) == 2
    # A line with time, machine and rank begins each start.
    start = r"^--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\S+) rank 0 of 2 ---$"
    starts = re.findall(start, logs[0], re.MULTILINE)
    assert len(starts) == 3 and starts[-1] == "n1" and re.match(start, logs[0].splitlines()[0])
    assert all(
        part in logs[0] for part in ("step 4/4 | loss", "complete  all 4", "step 6/6 | loss")
    )


def altered(tmp_path):
    shard = tmp_path / "shards" / "train-00000.bin"
    os.truncate(shard, shard.stat().st_size - 4)


@pytest.mark.parametrize(
    "args,damage,message",
    [
        (["--training.stps", "3"], None, "did you mean training.steps?"),
        (
            ["--training.global_batch_size", "7"],
            None,
            "training.global_batch_size = 7 does not divide over 2",
        ),
        (["--parallelism.dp_shard", "3"], None, "does not make 2 ranks"),
        ([], altered, "train-00000.bin has"),
        (
            ["--optimizer.matrix.rule", "mars-m", "--optimizer.matrix.split", "5"],
            None,
            "split = 5 does not divide the 96 rows",
        ),
        (
            ["--optimizer.vector.rule", "muon"],
            None,
            "a matrix rule needs parameters of at least two dimensions",
        ),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(config, tmp_path, args, damage, message):
    if damage:
        assert run_command("prepare", [str(config)], ROOT)[0] == 0
        damage(tmp_path)
    code, out, err = finish_run(config, *args)
    assert code == 2 and message in err and out == ""
    assert [
        line for line in err.splitlines() if line and not line.startswith("tokenising")
    ] == err.splitlines()[-1:]


def test_torchrun_alone_trains_a_run_to_its_end(config):
    options = ["--standalone", "--nproc-per-node", "2", "-m", "torchmars.train", str(config)]
    torchrun = Command("torchrun", [*options, "--training.steps", "4"], config.parent, ranks=2)
    out, err = torchrun.communicate(timeout=SECONDS)
    assert torchrun.returncode == 0 and "step 4/4 | loss" in out, err


def test_without_the_script_a_mistake_still_ends_every_rank(config, tmp_path):
    """torchrun itself makes 1 of every exit code."""
    assert run_command("prepare", [str(config)], ROOT)[0] == 0
    altered(tmp_path)
    options = ["--standalone", "--nproc-per-node", "2", "-m", "torchmars.train", str(config)]
    torchrun = Command("torchrun", options, ROOT, ranks=2)
    _, err = torchrun.communicate(timeout=SECONDS)
    assert torchrun.returncode == 1 and err.count("error: the shard") == 1
    code, _, err = run_command("rank", [str(config)], ROOT)
    assert code == 2 and err.count("\n") == 1


def test_a_checkpoint_that_only_ranks_can_tell_is_damaged_ends_with_code_2(config, tmp_path):
    """Its size is right, so that the check before the ranks lets it pass."""
    train(2, tiny_tables(tmp_path, training={"steps": 4}))
    for file in (tmp_path / "runs" / "tiny" / "checkpoints").glob("*/__1_0.distcp"):
        flip(file, 8000)
    code, out, err = finish_run(config, "--training.steps", "6", ranks=8, MAX_RESTARTS="3")
    assert code == 2
    assert err.count("error: ") == 1
    assert "__1_0.distcp was altered" in err
    assert "step 5" not in out
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_does_not_end_a_run(config, tmp_path):
    with open("/dev/full", "w") as full:
        rank = Command("rank", [str(config)], ROOT, stdout=full)
        _, err = rank.communicate(timeout=SECONDS)
    assert rank.returncode == 0, err
    assert manifests.read(tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000004").step == 4


def test_help(config):
    code, out, _ = finish(config, "--help", "optimizer")
    assert code == 0 and "--optimizer.gamma" in out
