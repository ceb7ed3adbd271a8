"""`torchmars COMMAND` and `python -m torchmars COMMAND`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmars import __main__ as entry
from torchmars import commands

ROOT = Path(__file__).parents[2]
NAMES = {
    "bench",
    "checkpoint",
    "compare",
    "config",
    "evaluate",
    "export",
    "generate",
    "import",
    "launch",
    "plan",
    "plot",
    "prepare",
    "presets",
    "rendezvous",
    "runs",
    "train",
    "transfer",
}


def main(monkeypatch, capsys, *args):
    """Exit code, output and errors of `torchmars ARGS`."""
    monkeypatch.setattr(sys, "argv", ["torchmars", *args])
    code = 0
    try:
        entry.main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_help_has_a_line_on_each_command(monkeypatch, capsys):
    assert set(commands.commands()) == NAMES
    shown = [main(monkeypatch, capsys, *args) for args in ([], ["--help"])]
    assert shown[0] == shown[1] and not shown[0][2] and "  launch " not in shown[0][1]
    for group in commands.COMMANDS.values():
        for name in group:
            text = commands.summary(name)
            assert f"  {name:<10}  {text}" in shown[0][1].splitlines() and text.endswith(".")


def test_an_unknown_command_is_named(monkeypatch, capsys):
    code, out, err = main(monkeypatch, capsys, "trian")
    assert (code, out) == (2, "")
    assert err == "error: unknown command 'trian': did you mean torchmars train?\n"


@pytest.mark.parametrize(
    "word,remedy",
    [
        ("eval", "did you mean torchmars evaluate?"),
        ("version", "did you mean torchmars --version?"),
        ("m.toml", "did you mean torchmars train m.toml?"),
        ("xyz", "torchmars --help lists them"),
        ("runs/plan", "torchmars --help lists them"),  # a path is no misspelt command
    ],
)
def test_a_word_like_a_command_and_one_like_none(monkeypatch, capsys, word, remedy):
    assert main(monkeypatch, capsys, word) == (
        2,
        "",
        f"error: unknown command '{word}': {remedy}\n",
    )


@pytest.mark.parametrize(
    "args,near",
    [
        (["train", "quickstart.toml", "--quite"], "--quiet"),
        (["prepare", "quickstart.toml", "--rank", "3"], "--ranks"),
        (["config", "--steps", "3"], "--training.steps"),
    ],
)
def test_a_commands_own_option_that_was_meant(monkeypatch, capsys, args, near):
    code, out, err = main(monkeypatch, capsys, *args)
    assert (code, out) == (2, "") and err.endswith(f": did you mean {near}?\n")


@pytest.mark.parametrize(
    "args",
    [
        ["train"],
        ["train", "--prepare", "--training.steps", "3"],
        ["launch", "-m", "torchmars.train", "--training.steps", "3"],
    ],
)
def test_a_run_needs_a_config(monkeypatch, capsys, tmp_path, args):
    monkeypatch.chdir(tmp_path)
    code, out, err = main(monkeypatch, capsys, *args)
    assert (code, out) == (2, "") and not any(tmp_path.iterdir())
    assert err.startswith("error: no config is named: torchmars train quickstart.toml")


def test_a_command_without_its_run_says_what_to_write(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = main(monkeypatch, capsys, "generate")
    assert said[:2] == (2, "") and "FOLDER: write torchmars generate runs/NAME" in said[2]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.toml").touch()
    for command, words in (
        ("plot", "RUNS: write torchmars plot runs/mine"),
        ("evaluate", "MODEL: write torchmars evaluate runs/mine"),
        ("export", "RUN, TARGET: write torchmars export runs/mine TARGET"),
    ):
        code, out, err = main(monkeypatch, capsys, command)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err
    said = main(monkeypatch, capsys, "train", "quickstart.toml", "--gpus", "2")[2]
    assert (
        said
        == "error: unrecognized arguments: --gpus 2: NGPU=2 torchmars train ... says how many\n"
    )


@pytest.mark.parametrize(
    "command,options",
    [
        ("bench", []),
        ("prepare", ["--data.source", "stdlib"]),
        ("compare", ["--optimizers", "adamw"]),
    ],
)
def test_no_command_that_works_takes_all_defaults_in_silence(
    monkeypatch, capsys, tmp_path, command, options
):
    monkeypatch.chdir(tmp_path)
    code, out, err = main(monkeypatch, capsys, command, *options)
    assert (code, out) == (2, "") and not any(tmp_path.iterdir())
    said = f"no config is named: torchmars {command} quickstart.toml takes one of a small model"
    assert err == f"error: {said}\n"


@pytest.mark.parametrize("name", ["logs", "logs/launcher-here.log", "events.jsonl"])
def test_a_launcher_writes_to_no_file_that_a_link_leads_to(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr("torchmars.commands.launch.prepare_run", lambda *args: None)
    link = tmp_path / "runs" / "x" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    config = ["quickstart.toml", "--run.name", "x", "--run.folder", str(tmp_path / "runs")]
    code, _, err = main(monkeypatch, capsys, "launch", "-m", "torchmars.train", *config)
    assert (code, err) == (2, f"error: {link} is a link, and the run writes there: remove it\n")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    "names", ["first.toml second.toml", "first file.toml", " \n", "first.toml *"]
)
def test_config_file_names_several_files(tmp_path, names):
    """Or one with a space in its name. Nothing of it is taken for a pattern."""
    for name in ("first.toml", "first file.toml"):
        (tmp_path / name).write_text("[training]\nsteps = 0\n")
    (tmp_path / "second.toml").write_text("[training]\nsteps = -2\n")
    ended = subprocess.run(
        [ROOT / "run_train.sh"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {"CONFIG_FILE": names, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert {
        "first.toml second.toml": "equal to 1, got -2 (in second.toml)",
        "first file.toml": "equal to 1, got 0 (in first file.toml)",
        " \n": "CONFIG_FILE is empty",
        "first.toml *": "cannot read the config *: No such file",
    }[names] in ended.stderr


def test_without_config_file_the_script_takes_the_files_that_it_is_given(tmp_path):
    """By a package that prints what it gets."""
    (tmp_path / "torchmars").mkdir()
    (tmp_path / "torchmars/__init__.py").touch()
    (tmp_path / "torchmars/__main__.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    env = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for args, taken in {
        (): "train quickstart.toml",
        ("--run.seed", "1"): "train quickstart.toml --run.seed 1",
        ("mine.toml", "--run.seed", "1"): "train mine.toml --run.seed 1",
    }.items():
        assert (
            subprocess.check_output([ROOT / "run_train.sh", *args], env=env).decode()
            == f"{taken}\n"
        )


@pytest.mark.slow
def test_an_installed_package_has_the_command_and_the_configs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("torchmars", "train_configs", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    configs = ["quickstart.toml", "gpt2-small-mars-m-openwebtext"]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "-q", "--target", target, source], check=True)
    ended = subprocess.run(
        [sys.executable, target / "bin" / "torchmars", "train", *configs, "--a.b", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target)},
    )
    assert ended.returncode == 2 and "unknown section a (on the command line)" in ended.stderr
