"""Every block of code in README.md and docs/ runs, or is one that the commands can take."""

import importlib.util
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from unittest import mock

import pytest
import torch

from tests.docs.pages import FILE_NAME, PAGES, ROOT, blocks, commands, named_files, split_page
from tests.support.ranks import run_ranks
from torchmars.__main__ import main
from torchmars.cluster.environment import Environment, read_environment
from torchmars.config.load import load_config
from torchmars.data.tokenizer import load_tokenizer
from torchmars.evaluation.tasks import Tasks

# text is what programs print. A block of another language is a mistake.
LANGUAGES = {"python", "toml", "bash", "text", "bibtex", "yaml"}
PROGRAMS = {
    ".",
    "lint-imports",
    "mypy",
    "pip",
    "pre-commit",
    "pytest",
    "ruff",
    "scancel",
}
VARIABLES = set(Environment.__dataclass_fields__) | {
    "CONFIG_FILE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TIKTOKEN_CACHE_DIR",
    "TORCHMARS_DATA",
    "WANDB_MODE",
}
# Commands whose arguments are config files and settings, beside options of their own.
OF_CONFIG = ("train", "prepare", "plan", "bench", "compare")


def without_plugins(language):
    """The blocks that load no plugin: those that do are run by test_extending.py."""
    return [block for block in blocks(language) if "plugins" not in block.text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_languages_are_known(page):
    found, prose = split_page(page)
    assert {block.language for block in found} <= LANGUAGES
    indented = [line for before, line in zip(prose, prose[1:]) if not before and line[:4] == "    "]
    assert not indented, "a block by indentation: write a fence"


def run_block(text):
    exec(compile(text, "block", "exec"), {"__name__": "block"})


def printed_by(text):
    """Return what a block prints on this rank."""
    with redirect_stdout(StringIO()) as out:
        run_block(text)
    return out.getvalue()


# A file that a page names is run by a test of that page.
OF_NO_FILE = [block for block in blocks("python") if not FILE_NAME.match(block.text)]


@pytest.mark.parametrize("block", OF_NO_FILE, ids=str)
def test_python_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the Trainer makes a folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    if "fully_shard" in block.text:
        printed = run_ranks(printed_by, 2, block.text)[0].split()
    else:
        run_block(block.text)
        printed = capsys.readouterr().out.split()
    if "loss" in printed:
        assert float(printed[-1]) < 1.0  # it fell from log(100)


def test_a_tokenizer_is_made_of_a_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.txt").write_text("The fox went over the hill. " * 100)
    run_block(named_files("python")["make_tokenizer.py"])
    tokenizer = load_tokenizer("./tokenizer.json")
    assert capsys.readouterr().out.split() == [str(tokenizer.vocab_size), "tokens"]
    ids = tokenizer.encode("The fox wént over")
    assert tokenizer.decode(ids.tolist()) == "The fox wént over" and len(ids) < 15
    assert tokenizer.end_of_text == 0


def test_tasks_of_files_can_be_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in named_files("yaml").items():
        (tmp_path / name).write_text(text)
    [rows] = [block.text for block in blocks("text") if block.text.startswith('{"context"')]
    (tmp_path / "sums.jsonl").write_text(rows)
    row = {"ctx_a": "A fox sits.", "ctx_b": "it", "activity_label": "Foxes", "label": "1"}
    row |= {"endings": ["runs [away].", "sleeps.", "sings.", "flies."]}
    written = "".join(json.dumps(row | {"ind": number}) + "\n" for number in range(3))
    (tmp_path / "hellaswag_val.jsonl").write_text(written)
    tasks = Tasks(["sums.yaml", "hellaswag_file.yaml"], shots=1)
    assert tasks.requests == 2 * 2 + 3 * 4
    texts = [task.instances[0].args for task in tasks.tasks.values()]
    one, two = ("One and two are three", "Two and two are")
    assert texts[0] == (f"{one}\n\n{two}", " three")
    example, question = "Foxes: A fox sits. It sleeps.", "Foxes: A fox sits. It"
    assert texts[1] == (f"{example}\n\n{question}", " runs .")


@pytest.mark.parametrize("block", without_plugins("toml"), ids=str)
def test_config_is_valid(block, tmp_path):
    (tmp_path / "my.toml").write_text(block.text)
    load_config([str(tmp_path / "my.toml")], "test")


def test_settings_of_configs_arrive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.toml").write_text(named_files("toml")["books.toml"])
    assert load_config(["books.toml"], "test").run.name == "books"
    [split] = [block.text for block in blocks("toml") if "split = " in block.text]
    (tmp_path / "split.toml").write_text(split)
    assert load_config(["split.toml"], "test").optimizer.groups[0].split == 3


@pytest.mark.parametrize("block", without_plugins("bash"), ids=str)
def test_commands_are_known(block, tmp_path, monkeypatch):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    for name, text in named_files("toml").items():
        (tmp_path / name).write_text(text)
    assert commands(block)
    for command in commands(block):
        assert set(command.variables) <= VARIABLES
        found = {"RDZV_ENDPOINT": "first-node:20000"} if "sbatch" in command.words else {}
        read_environment(found | command.variables | {"SLURM_JOB_ID": ""})
        check_words(command.words, command.variables.get("CONFIG_FILE", "").split())


def check_words(words, config):
    """Check one command, which finds the config files `config` in its environment."""
    if not words:  # variables only
        return
    program, *args = words
    if program == "sbatch":
        program, *args = args[args.index("run_train.sh") :]
    if program.endswith("run_train.sh"):
        check_arguments("train", [*config, *args])
    elif program == "torchmars":
        check_arguments(*split_subcommand(args))
    elif program == "torchrun":
        module, *args = args[args.index("-m") + 1 :]
        check_words(["python", "-m", module, *args], config)
    elif program in ("python", "python3") and args[0] == "-m":
        package, _, command = args[1].partition(".")
        if "." in command:
            assert importlib.util.find_spec(args[1])
        elif package == "torchmars":
            check_arguments(*split_subcommand([*([command] if command else []), *args[2:]]))
        else:
            assert importlib.util.find_spec(args[1])
    elif program == "python":
        assert (ROOT / args[0]).is_file() or args[0] in named_files("python")
    else:
        assert program in PROGRAMS


def split_subcommand(args):
    """Return a command, with the one after it for `checkpoint`, and the other arguments."""
    count = 2 if args[0] == "checkpoint" else 1
    return " ".join(args[:count]), args[count:]


def check_arguments(command, args):
    """Check that a command of torchmars knows its options, and a config what it is given."""
    settings = []
    while args:
        option = args[0].partition("=")[0]
        if option.startswith("--") and "." not in option and option != "--help":
            assert option.replace("_", "-") in options_of(command), f"{command} {option}"
            args = args[2:] if command in OF_CONFIG else args[1:]
        else:
            settings.append(args[0])
            args = args[1:]
    if command in OF_CONFIG:
        if "--help" not in settings:
            load_config(settings, "test")
    else:
        options_of(command)


@cache
def options_of(command):
    """Return the options that the help of a command names, written with hyphens."""
    argv = ["torchmars", *command.split(), "--help"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch("sys.stdout", StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert not ended.value.code
    return {name.replace("_", "-") for name in re.findall(r"--[\w-]+", printed.getvalue())}
