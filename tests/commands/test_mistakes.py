"""Whatever a user gets wrong ends in one line."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, finish
from tests.support.full import FULL
from tests.support.mistakes import mistake
from torchmars.begin import install_command
from torchmars.cluster.connection import open_store
from torchmars.cluster.environment import read_environment
from torchmars.config import MetricsConfig
from torchmars.config.load import load_config
from torchmars.core.errors import UserError
from torchmars.records.trackers import check_trackers
from torchmars.training.preparation import prepare_run, write_settings

# What a user writes, the setting that the line names, and the one that was meant. Lines of TOML
# begin with [, all else is of the command line.
SETTINGS = """
--run.name a/b | run.name
--run.seed -1 | run.seed
--run.folder s3://b/x | run.folder
--run.sed 3 | run.sed | run.seed
[run] name = 3 | run.name
--model.name mamba | model.name
--model.name lama | model.name | llama
--model.n_layer 0 | model.n_layer
--model.n_layers 3 | model.n_layers | model.n_layer
[model] n_embd = true | model.n_embd
--transfer.depth L | transfer.depth
--transfer.n_embd 0 | transfer.n_embd
--transfer.dept none | transfer.dept | transfer.depth
[transfer] n_layer = 1.5 | transfer.n_layer
--data.validation_fraction 0.9 | data.validation_fraction
--data.packing best | data.packing
--data.tokeniser gpt2 | data.tokeniser | data.tokenizer
[data] files = "a" | data.files
--training.steps many | training.steps
--training.steps 0 | training.steps
--training.stps 3 | training.stps | training.steps
--training.dtype float8 | training.dtype
[training] steps = "3" | training.steps
[trainning] steps = 3 | trainning | training
--optimizer.betas 0.9 | optimizer.betas
--optimizer.name adamW | optimizer.name | adamw
--optimizer.weight_decy 0 | optimizer.weight_decy | optimizer.weight_decay
[optimizer] lr = true | optimizer.lr
--schedule.name cos | schedule.name
--schedule.warmup 5 | schedule.warmup | schedule.warmup_steps
[schedule] min_lr = "x" | schedule.min_lr
--parallelism.tp 1.5 | parallelism.tp
--parallelism.pp_schedule gpipe | parallelism.pp_schedule
--parallelism.dp_replica 2 | parallelism.dp_replica | parallelism.dp_replicate
--activation_checkpoint.mode ful | activation_checkpoint.mode
--activation_checkpoint.mod full | activation_checkpoint.mod | activation_checkpoint.mode
--checkpoint.interval -5 | checkpoint.interval
--checkpoint.intervall 5 | checkpoint.intervall | checkpoint.interval
[checkpoint] at_end = "true" | checkpoint.at_end
--guards.spike_sigmas 0 | guards.spike_sigmas
--guards.hang_second 6 | guards.hang_second | guards.hang_seconds
--validation.windows 0 | validation.windows
--validation.sample_token 3 | validation.sample_token | validation.sample_tokens
--evaluation.shots -1 | evaluation.shots
--evaluation.batch 3 | evaluation.batch | evaluation.batch_size
[evaluation] tasks = "hellaswag" | evaluation.tasks
--metrics.wandb 1 | metrics.wandb
--metrics.wandb_projet x | metrics.wandb_projet | metrics.wandb_project
--profiler.start -1 | profiler.start
--profiler.stps 3 | profiler.stps | profiler.steps
--optimizer.matrix.split 0 | optimizer.matrix.split
--optimizer.head.rule Shampoo | optimizer.head.rule
--optimizer.router.weight_decy 3 | optimizer.router.weight_decy | optimizer.router.weight_decay
[optimizer.head] lr = -1.0 | optimizer.head.lr
[optimizer.embeding] lr = 1 | optimizer.embeding | optimizer.embedding
[[optimizer.groups]] lr = 1.0 | optimizer.groups
--plugins no_such_module | no_such_module
--plugins my_plugin.py | run.plugins
[run] plugins = "a" | run.plugins
--run.plugin x | run.plugin | run.plugins
""".strip().splitlines()


@pytest.mark.parametrize("written,named,near", [(*line.split(" | "), "")[:3] for line in SETTINGS])
def test_a_setting_that_is_wrong_is_named_with_where_it_is_from(tmp_path, written, named, near):
    args, where = written.split(), "command line"
    if written.startswith("["):
        (tmp_path / "mine.toml").write_text(written.replace("] ", "]\n"))
        args, where = [str(tmp_path / "mine.toml")], "mine.toml"
    said = mistake(load_config, args, "test")
    assert named in said and (where in said or "plugins" in said)
    assert not near or near in said.partition("did you mean ")[2]


NONSENSE = {
    "NGPU": ["", "0", "9999999"],
    "NNODES": ["two", "1.5"],
    "NODE_RANK": ["-1"],
    "MAX_RESTARTS": ["\x1b[0m"],
    "RDZV_TIMEOUT": ["inf", "45 s"],
    "LOST_SECONDS": ["-1", "7"],
    "RDZV_ENDPOINT": ["29400"],
    "RDZV_TOKEN": [""],
    "LOG_RANK": ["0,"],
    "OMP_NUM_THREADS": ["9" * 30],
    "CONFIG_FILE": ["", "fifo", "a/" * 2500],
}


@pytest.mark.parametrize("names", [["NNODES"], pytest.param([*NONSENSE], marks=FULL)])
def test_run_train_names_the_variable_that_is_wrong(place, names):
    """Real commands. The rest of them fails where the first does, before torch is imported."""
    for name in names:
        for value in NONSENSE[name]:
            code, out, err = finish(place / "tiny.toml", **{name: value})
            assert code == 2 and not out and err.startswith("error: "), (name, value, err)
            assert err.count("\n") == 1 and name in err, (name, value, err)


def test_variables_of_a_job_stand_in_for_those_that_are_not_set():
    job = {
        "SLURM_JOB_ID": "7",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "RDZV_ENDPOINT": "n1:29400",
    }
    environment = read_environment(job | {"NGPU": "2"})
    assert (environment.NNODES, environment.NGPU) == ((4, 4), 2) and read_environment(job).NGPU == 8
    by_hand = job | {"ENVIRONMENT": ""}  # within the job
    assert read_environment(by_hand).NNODES == (1, 1)
    said = mistake(read_environment, job | {"SLURM_GPUS_ON_NODE": "gpu:8"})
    assert "SLURM_GPUS_ON_NODE must be a valid integer" in said
    nowhere = {name: value for name, value in job.items() if name != "RDZV_ENDPOINT"}
    assert "SLURM_JOB_NUM_NODES = 4 needs RDZV" in mistake(read_environment, nowhere)
    for asked, found in (("2:8", (2, 4)), ("6:8", (6, 6)), ("2:3", (2, 3)), ("8", (8, 8))):
        assert read_environment(job | {"NNODES": asked}).NNODES == found


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_the_variables_of_a_rank(monkeypatch, name):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "4711"}
    for each, given in rank.items():
        monkeypatch.setenv(each, given)
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"^RANK is set, and not all .* variable {name} expected"):
        open_store()


@pytest.mark.parametrize("name,extra", [("wandb", ""), ("tensorboard", "tensorboard")])
def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch, name, extra):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # as W&B makes it: no package
    found = mistake(check_trackers, MetricsConfig(**{name: True}))
    assert f"metrics.{name} needs the package {name}: {install_command(extra)}" in found


@pytest.fixture
def job(place):
    """The environment of a SLURM job's script, with commands that only note how they are called."""
    (place / "bin").mkdir()
    for name in ("scontrol", "srun"):
        command = place / "bin" / name
        command.write_text(
            f'#!/bin/sh\necho {name} $RDZV_ENDPOINT "$@" >> called\necho localhost\n'
        )
        command.chmod(0o755)
    path = (
        f"{place / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    return {
        "PATH": path,
        "SLURM_JOB_ID": "12007",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "n[1-2]",
    }


def test_a_mistake_in_a_job_ends_it_once(place, job):
    for wrong in (
        {"NGPU": "x"},
        {"NNODES": "two"},
        {"NNODES": "a[$(id)]"},
        {"RDZV_TIMEOUT": ""},
        {"SLURM_JOB_NUM_NODES": "x"},
    ):
        code, out, err = finish(place / "tiny.toml", **job | wrong)
        assert code == 2 and not out and err.count("\n") == 1 and err.startswith("error: ")
        assert next(iter(wrong)) in err
        assert not re.search("srun|requeue", (place / "called").read_text())


def test_a_job_starts_a_launcher_on_each_node(place, job):
    code, _, err = finish(place / "tiny.toml", "--training.steps", "2", **job)
    called = (place / "called").read_text()
    assert code == 0, err
    found = re.search(r"srun (localhost:2\d{4}) --ntasks=2 --ntasks-per-node=1 .*\n", called)
    assert found and "requeue" not in called and "no-kill" not in called + err
    command = f"python -m torchmars train --prepared {place / 'tiny.toml'} --training.steps 2\n"
    assert found[0].endswith(command)
    # The store of the job has ended with its script.
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not any(found[1] in command for command in commands)


@pytest.mark.parametrize("own", [{}, pytest.param({"SBATCH_NO_KILL": "set"}, marks=FULL)])
def test_a_job_of_changing_machines_goes_on_without_lost_nodes(place, job, own):
    """It says by which option sbatch does the same, unless it knows that this was given."""
    changing = {"NNODES": "1:2", "SLURM_JOB_NUM_NODES": "3"} | own
    arguments = [place / "tiny.toml", "--training.steps", "2", "--training.global_batch_size", "12"]
    code, _, err = finish(*arguments, **job | changing)
    assert code == 0, err
    called = (place / "called").read_text()
    assert re.search("srun .* --ntasks=3 .* --kill-on-bad-exit=0 --no-kill python -m", called)
    said = [line for line in err.splitlines() if "--no-kill" in line]
    assert len(said) == (0 if own else 1)


@FULL
def test_a_job_of_one_node_or_with_an_endpoint_of_its_own_has_no_store(place, job):
    for own in ({"SLURM_JOB_NUM_NODES": "1"}, {"RDZV_ENDPOINT": "nowhere:1"}):
        (place / "called").unlink(missing_ok=True)
        code, _, err = finish(place / "tiny.toml", "--training.steps", "2", **job | own)
        assert code == 0, err
        assert re.search(r"srun (localhost:2\d{4}|nowhere:1) ", (place / "called").read_text())


def test_where_no_checkpoint_could_be_written_a_run_does_not_start(place):
    (place / "runs" / "tiny").mkdir(parents=True)
    (place / "runs" / "tiny" / "checkpoints").touch()
    said = mistake(write_settings, load_config(["tiny.toml"], "test"))
    assert "runs/tiny/checkpoints: set run.folder" in said


@pytest.mark.parametrize(
    "args,message",
    [
        (
            ["--guards.hang_seconds", "inf"],
            "guards.hang_seconds must be less than or equal to 1000000, got",
        ),
        (
            ["--optimizer.matrix.split", "0"],
            "optimizer.matrix.split must be greater than or equal to 1, got",
        ),
        (
            ["--data.path", "loop"],
            "data.path: loop is no folder that can be used (Too many levels of symbolic links)",
        ),
        (["--run.folder", "fifo"], "run.folder: fifo is no folder"),
        (["--run.name", "a\0b"], "run.name must be"),
        (
            ["--checkpoint.init_from", "fifo.safetensors"],
            "checkpoint.init_from: fifo.safetensors is no file that can be used "
            "(Not a regular file)",
        ),
        (["--data.files", "fifo"], "data.files: 'fifo' names no text file"),
    ],
)
def test_what_is_too_large_and_paths_that_are_none_are_named(place, args, message):
    data = [] if "--data.path" in args else ["--data.path", "new"]
    said = mistake(lambda: prepare_run(load_config(["tiny.toml", *data, *args], "test"), 2, 1))
    assert message in said


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config([str(tmp_path / "config.toml")], "test").training.steps == 7
