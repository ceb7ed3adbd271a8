"""What a launcher and a rank import before the first step: nothing that they may not need."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exchange.test_hostile_folders import MODELS, make_folder
from tests.support.commands import ROOT
from tests.support.full import FULL
from tests.support.tiny import tiny_config, write_config, write_text
from tests.support.tokenizers import letters
from torchmars import optim
from torchmars.exchange.saved_model import open_folder
from torchmars.training.preparation import prepare_data

OPTIONAL = {
    "wandb",
    "tensorboard",
    "transformers",
    "datasets",
    "lm_eval",
    "pyarrow",
    "tokenizers",
    "tiktoken",
    "torch.distributed.pipelining",
    "torch._inductor.compile_fx",
}
RANK = """
from torchmars.train import main
from torchmars.cluster import connection
from torchmars.training import trainer
"""
LAUNCHER = """
from torchmars.commands import launch
from torchmars.cluster.sizes import MinMax
config = launch.load_config([sys.argv[1]], "test")
launch.prepare(config, launch.sizes_of(config, MinMax(1, 1), 2))
"""


EVERY_HELP = """
import contextlib, importlib, io, os
from torchmars.__main__ import commands
for name in commands():
    sys.argv = [name, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"torchmars.commands.{name.replace('-', '_')}").main()
"""


def imported(file):
    """Yield the modules that a file names, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module


def test_optim_imports_torch_only():
    """And what `MARS` imports on GPUs alone imports Triton."""
    allowed = {*sys.stdlib_module_names, "torch"}
    folder = Path(optim.__file__).parent
    without = {"choice", "launches"}
    on_gpus = {file for file in (folder / "gpu").glob("*.py") if file.stem not in without}
    for file in folder.rglob("*.py"):
        own = allowed | {"triton"} if file in on_gpus else allowed
        others = [name for name in imported(file) if name.split(".")[0] not in own]
        assert all(name.startswith("torchmars.optim") for name in others), f"{file}: {others}"


def test_what_rules_declare_is_read_without_torch():
    program = "import sys; import torchmars.optim.rules; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "torch" not in ended.stdout.split()


def test_listing_runs_needs_neither_torch_nor_matplotlib(tmp_path):
    """Nor does a launcher that asks for its rank, or a list of runs in an object store."""
    program = (
        "import sys; from torchmars.commands import plot, runs; from torchmars.cluster import "
        "process; from torchmars.storage import objects; from torchmars.checkpoint import manifest;"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(ended.stdout.split()) & {"torch", "matplotlib"}


@pytest.mark.parametrize(
    "program,others",
    [
        (RANK, set()),
        (EVERY_HELP, set()),
        # torch's compiler, its checkpoints and FSDP are for ranks. Each takes a large part of a
        # second, before any rank can start.
        pytest.param(
            LAUNCHER,
            {"torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"},
            marks=FULL,
        ),
    ],
    ids=["rank", "help", "launcher"],
)
def test_a_start_does_not_import_what_it_may_not_need(tmp_path, program, others):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    write_config(config, tmp_path / "tiny.toml")
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)", "tiny.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(ended.stdout.splitlines()[-1].split())
    assert "torchmars.config" in imported
    assert not imported & (OPTIONAL | others)


def test_a_run_that_starts_from_a_folder_of_transformers_does_without_it(tmp_path):
    """From the launcher to the last step."""
    folder = make_folder(tmp_path / "model", MODELS["llama"])
    letters().save(str(folder / "tokenizer.json"))
    tables = open_folder(folder).tables
    sections = {name: tables[name] for name in ("model", "checkpoint", "data")}
    write_text(tmp_path)
    training = {"steps": 1, "seq_len": 16, "dtype": "float32"}
    write_config(tiny_config(tmp_path, training=training, **sections), tmp_path / "tiny.toml")
    (tmp_path / "path" / "transformers").mkdir(parents=True)
    (tmp_path / "path" / "transformers" / "__init__.py").write_text("raise AssertionError")
    env = os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}", "NGPU": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "torchmars", "train", "tiny.toml"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and "weights of hf:" in ended.stdout, ended.stderr
