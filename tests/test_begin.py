"""What a command, or run_train.sh, says where Python or its packages are not as they must be."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.support.full import FULL
from tests.support.tiny import tiny_config, write_config, write_text
from torchmars import begin

ROOT = Path(__file__).parents[1]


def test_what_is_looked_for_are_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[<>=]", each)[0].replace("-", "_") for each in project["dependencies"]]
    assert names == [*begin.MODULES, "wandb"]  # which is looked for where a run asks for it
    assert project["requires-python"] == ">={}.{}".format(*begin.OLDEST)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_grows_unless_the_user_says_otherwise(name):
    default, own = {}, {name: "max_split_size_mb:128"}
    begin.set_defaults(default)
    assert default["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    begin.set_defaults(own)
    assert {each for each in own if "ALLOC" in each} == {name}
    assert own[name] == "max_split_size_mb:128"


@pytest.fixture
def bare(tmp_path):
    """Start commands by a Python without any package, as one from the system may be."""
    (tmp_path / "tqdm").mkdir()  # a folder of the user's: no package
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)

    def start(*command, folder=tmp_path, **environment):
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", **environment},
        )

    return start


@pytest.mark.parametrize(
    "command", [["torchmars", "runs"], ["torchmars.plan"], ["torchmars.train", "a.toml"]]
)
def test_a_python_without_the_dependencies_is_one_line(bare, command):
    ended = bare("python", "-m", *command, PYTHONPATH=str(ROOT))
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    python = os.path.realpath(sys.executable)
    assert ended.stderr.startswith(f"error: {python} lacks torch, numpy, ")
    remedy = f"{python} -m pip install -e {ROOT} -c {ROOT}/constraints.txt, or activate"
    assert f"tqdm: {remedy}" in ended.stderr


def test_the_installed_command_says_so_too(bare, tmp_path):
    """By a file of that name, as pip makes it."""
    (tmp_path / "torchmars").write_text("from torchmars.__main__ import main\nmain()\n")
    ended = bare("python", "torchmars", "runs", PYTHONPATH=str(ROOT))
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert " lacks torch, " in ended.stderr


def test_the_script_before_the_installation_is_one_line(bare, tmp_path):
    project = tmp_path / "project"  # which has no environment, as this clone may have
    project.mkdir()
    script = shutil.copy(ROOT / "run_train.sh", project)
    copy = bare(script)  # in a folder that nobody can install
    assert copy.returncode == 2 and copy.stderr == (
        "error: no Python here has torchmars: install it, or activate the environment that has "
        "torchmars\n"
    )
    (project / "torchmars").mkdir()
    (project / "torchmars" / "__init__.py").touch()
    ended = bare(script)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: no Python here has torchmars: python3 -m venv {project}/.venv && "
        f"{project}/.venv/bin/pip install -e {project} "
        f"-c {project}/constraints.txt makes one that this script finds, or "
        "install it, or activate the environment that has torchmars\n"
    )
    ended = bare(script, folder=ROOT)  # where Python finds it, but not what it needs
    assert ended.returncode == 2 and ended.stderr.startswith("error: no Python here has torchmars")
    (tmp_path / "bin" / "python").unlink()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    ended = bare(script, PATH=str(tmp_path / "bin"))
    assert ended.returncode == 2 and ended.stderr.startswith("error: no Python here has torchmars")


def test_what_is_missing_is_installed_from_the_clone_or_by_its_own_name(tmp_path, monkeypatch):
    """Never by the name of this project, which belongs to nobody in an index."""
    clone = tmp_path / "a clone"
    monkeypatch.setattr(begin, "ROOT", clone)
    assert begin.install_command("plot", "matplotlib") == "pip install matplotlib"  # a wheel
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    pinned = f"-c '{clone}/constraints.txt'"
    assert begin.install_command("plot", "x") == f"pip install -e '{clone}[plot]' {pinned}"
    assert begin.install_command("", "x") == f"pip install -e '{clone}' {pinned}"


def test_an_old_python_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit) as ended:
        begin.check_python()
    assert ended.value.code == 2
    assert f"error: {sys.executable} is Python 3.9: take Python 3.11" in capsys.readouterr().err


PROFILE = """
import signal, sys
sys.argv = ["-m"]
import torchmars
assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
from torchmars.core.errors import exit_on_user_error
with exit_on_user_error():
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
from torch.profiler import profile
with profile():
    pass
"""


@FULL
def test_a_command_makes_imports_and_the_profiler_silent():
    ended = subprocess.run([sys.executable, "-c", PROFILE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@FULL
@pytest.mark.parametrize("command", [["./run_train.sh"], ["python", "-m", "torchmars", "train"]])
def test_a_clone_that_is_not_installed_trains(tmp_path, command):
    """Its ranks are of the clone too. The Python has all packages but this one."""
    for name in ("torchmars", "train_configs"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=without)
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    for file in (tmp_path / "torchmars" / "train.py", tmp_path / "torchmars/commands/train.py"):
        tells = f"open({str(tmp_path / 'clone')!r}, 'a').write(__name__)"
        file.write_text(f"{tells}\n{file.read_text()}")
    packages = sysconfig.get_path("purelib")
    python = tmp_path / "bin" / "python"  # -S: it reads no file that says where this clone is
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{packages} exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    write_text(tmp_path)
    write_config(tiny_config(tmp_path, training={"steps": 1}), tmp_path / "tiny.toml")
    own = {"PATH": f"{python.parent}:/usr/bin:/bin", "NGPU": "1", "CONFIG_FILE": "tiny.toml"}
    ended = subprocess.run(
        [*command, *["tiny.toml"] * (len(command) > 1)],
        cwd=tmp_path,
        env=own | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "clone").read_text() == "torchmars.commands.train__main__"


@pytest.mark.parametrize("place", ["bin/python3", ".venv/bin/python"])
def test_the_script_finds_a_python_of_another_name(bare, tmp_path, place):
    """As on Debian, which has no `python`; and an environment that nobody has activated."""
    (tmp_path / "bin" / "python").unlink()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    (tmp_path / "run_train.sh").write_text((ROOT / "run_train.sh").read_text())
    (tmp_path / "run_train.sh").chmod(0o755)
    python = tmp_path / place
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = {"CONFIG_FILE": str(ROOT / "train_configs" / "quickstart.toml")}
    script = str(tmp_path / "run_train.sh")
    ended = bare(script, "--a.b", "1", PATH=str(tmp_path / "bin"), **config)
    assert ended.returncode == 2 and "unknown section a" in ended.stderr, ended.stderr
