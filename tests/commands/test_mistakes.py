"""Whatever a user gets wrong ends in one line: fuzzed in process, and what is known by name.

Hypothesis draws the same examples in every run; the longer form (`-m slow`) draws more of them.
tests/test_commands.py has real commands.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import tomli_w
from hypothesis import strategies as st

from tests.support.commands import ROOT, finish
from tests.support.full import FULL
from tests.support.mistakes import (
    KEYS,
    fuzz,
    junk,
    mistake,
    scalars,
    sizes,
    words,
)
from tests.support.tiny import tiny_tables
from torchmars import train as rank
from torchmars.begin import install_command
from torchmars.cluster.environment import Environment, cores_of, read_environment
from torchmars.commands import launch, train
from torchmars.config import MetricsConfig
from torchmars.config.load import config_text, load_config
from torchmars.config.load import merge_two as merge
from torchmars.records.trackers import check_trackers
from torchmars.training.preparation import prepare_run, write_settings

# The environment.

VARIABLES = list(Environment.__dataclass_fields__)


@sizes
def test_variables(examples):
    def check(variables):
        said = mistake(read_environment, variables)
        assert not said or any(name in said for name in variables), said

    values = st.one_of(words, st.text(max_size=6), st.integers().map(str))
    fuzz(examples, st.dictionaries(st.sampled_from(VARIABLES), values), check)


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
    assert "SLURM_GPUS_ON_NODE must be a whole number" in said
    nowhere = {name: value for name, value in job.items() if name != "RDZV_ENDPOINT"}
    assert "SLURM_JOB_NUM_NODES = 4 needs RDZV" in mistake(read_environment, nowhere)
    lost = {"NNODES": "2:8", "SLURM_RESTART_COUNT": "1"}  # nodes, so the job comes back with fewer
    assert read_environment(job | lost).NNODES == (2, 4)
    assert "more than the 4 nodes of this job" in mistake(read_environment, job | {"NNODES": "2:8"})
    last = job | {"NODE_RANK": "4"}
    assert "must be less than SLURM_JOB_NUM_NODES = 4" in mistake(read_environment, last)


@pytest.mark.parametrize(
    "options,message",
    [
        (["--nnodes=two"], "--nnodes must be a whole number from 1"),
        (["--rdzv-conf=x"], "unrecognized arguments: --rdzv-conf=x: see --help"),
        (["--local-ranks-filter=5"], "LOG_RANK must be numbers of a machine's ranks, below 2"),
        (["--local-ranks-filter=x"], "--local-ranks-filter must be numbers of a machine's ranks"),
    ],
)
def test_an_option_of_launch_is_named_by_its_own_name(place, monkeypatch, capsys, options, message):
    for name in ("RDZV_ENDPOINT", "RDZV_TOKEN", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    command = ["launch", "--prepared", *options, "-m", "torchmars.train", "tiny.toml"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")


MANY = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize("value", [MANY, "0", "x", "-1"])
def test_the_cores_of_a_job(value):
    job = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH"}
    assert cores_of(job | {"SLURM_CPUS_ON_NODE": "12"}) == 12
    said = mistake(cores_of, job | {"SLURM_CPUS_ON_NODE": value})
    assert "SLURM_CPUS_ON_NODE must be " in said


RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "4711"}


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("RANK", MANY, "RANK must be a whole number"),
        ("WORLD_SIZE", "0", "RANK and LOCAL_RANK must be less than WORLD_SIZE"),
        ("LOCAL_RANK", "one", "LOCAL_RANK must be a whole number"),
        ("LOCAL_WORLD_SIZE", MANY, "LOCAL_WORLD_SIZE must be a whole number"),
        ("MASTER_PORT", "70000", "MASTER_PORT must be at most 65,535"),
        ("RANK", "1", "RANK and LOCAL_RANK must be less than WORLD_SIZE"),
        ("MASTER_ADDR", None, "RANK is set, but MASTER_ADDR is not: start ranks by"),
    ],
)
def test_the_variables_of_a_rank(place, monkeypatch, capsys, name, value, message):
    for each, given in (RANK | {name: value}).items():
        monkeypatch.setenv(each, given) if given else monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(sys, "argv", ["rank", "tiny.toml"])
    with pytest.raises(SystemExit) as ended:
        rank.main.__wrapped__()
    assert ended.value.code == 2
    if name != "LOCAL_RANK":  # the first rank of a machine speaks
        assert capsys.readouterr().err.startswith(f"error: {message}")


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
        {"NNODES": "2:8"},
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


@pytest.mark.parametrize("own", [{}, {"SBATCH_NO_KILL": "set"}])
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


def test_where_no_temporary_file_can_be_made_a_run_does_not_start(place, monkeypatch, capsys):
    """torch may look for their folder while it is imported, and so it comes first."""
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda: Path("/nowhere/x").stat())
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "argv", ["train", "no-such.toml"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: no temporary file can be made: make room in /tmp, or set TMPDIR")


def test_where_no_checkpoint_could_be_written_a_run_does_not_start(place):
    (place / "runs" / "tiny").mkdir(parents=True)
    (place / "runs" / "tiny" / "checkpoints").touch()
    said = mistake(write_settings, load_config(["tiny.toml"], "test"))
    assert "runs/tiny/checkpoints: Not a directory: set run.folder" in said


# Configs.


def nested_in(name, value):
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


GROUP = ["pattern", "rule", "lr", "split"]
groups = st.lists(st.dictionaries(st.sampled_from(GROUP), scalars), max_size=2)
values = st.one_of(junk, junk, st.dates(), groups)
changes = st.dictionaries(st.sampled_from(KEYS), values, max_size=2)
option = st.tuples(st.sampled_from(KEYS), st.lists(words, max_size=3))
options = st.lists(option.map(lambda drawn: [f"--{drawn[0]}", *drawn[1]]), max_size=2)


@sizes
def test_configs(place, examples):
    """Each is read and, where it can be, prepared; one that is accepted reads back the same."""
    base = tiny_tables(place)

    def check(drawn):
        changed, args = drawn
        tables = base
        for name, value in changed.items():
            tables = merge(tables, nested_in(name, value))
        try:
            (place / "drawn.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
        except (UnicodeEncodeError, TypeError):  # no TOML
            return
        mistake(lambda: use(["drawn.toml", *sum(args, [])]))

    def use(args):
        config = load_config(args, "test")
        (place / "again.toml").write_text(config_text(config), encoding="utf-8")
        assert config_text(load_config(["again.toml"], "test")) == config_text(config)
        prepare_run(config, 2, 1)

    fuzz(examples, st.tuples(changes, options), check)


@sizes
def test_texts_and_command_lines(place, examples):
    """Neither of which has to be of the right form at all."""
    text = (place / "tiny.toml").read_text()
    edits = st.tuples(st.integers(0, len(text)), st.text(max_size=5), st.integers(0, 40))
    cut = edits.map(lambda edit: text[: edit[0]] + edit[1] + text[edit[0] + edit[2] :])
    odd = st.sampled_from(
        [
            "a = " + "[" * 5000,
            "a = " + "{b = " * 5000,
            "[" + "a." * 5000 + "b]",
            "a = " + "9" * 5000,
            "a = 0x" + "f" * 5000,
            "\0",
            "\ufeff\ufeff",
        ]
    )
    option = st.sampled_from([f"--{key}" for key in KEYS])
    arguments = st.lists(st.one_of(words, st.text(max_size=8), option), max_size=4)
    arguments = arguments.filter(lambda args: not {"-h", "--help"} & set(args))

    def check(drawn):
        args, content = drawn
        content = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
        (place / "drawn.toml").write_bytes(content)
        mistake(load_config, args, "test")
        mistake(load_config, ["drawn.toml", *args], "test")

    fuzz(examples, st.tuples(arguments, st.one_of(cut, odd, st.binary(max_size=20))), check)


@pytest.mark.parametrize(
    "args,message",
    [
        (
            ["--guards.hang_seconds", "inf"],
            "guards.hang_seconds must be at most 1,000,000, got",
        ),
        (["--optimizer.matrix.split", "0"], "optimizer.matrix.split must be at least 1, got"),
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
        (["--metrics.wandb_project", "\udcff"], "metrics.wandb_project must be Unicode text"),
    ],
)
def test_what_is_too_large_and_paths_that_are_none_are_named(place, args, message):
    data = [] if "--data.path" in args else ["--data.path", "new"]
    said = mistake(lambda: prepare_run(load_config(["tiny.toml", *data, *args], "test"), 2, 1))
    assert message in said


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config([str(tmp_path / "config.toml")], "test").training.steps == 7
