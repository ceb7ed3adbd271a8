"""What tests of comparisons share: a tiny config, and trials in processes that start quickly."""

import os
from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.comparison import local


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config file of runs of 12 steps, in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    sections = {
        "training": {"steps": 12},
        "schedule": {"warmup_steps": 1},
        "checkpoint": {"interval": 2, "async_save": False},
        "validation": {"interval": 6, "windows": 8},
    }
    write_config(tiny_config(tmp_path, **sections), tmp_path / "tiny.toml")
    return tmp_path / "tiny.toml"


def start_quickly(file, variables):
    """What `local.start_process` does, in processes that need not import torch."""
    with (file.parent / "output.log").open("a") as output:
        env = variables | {"RDZV_TIMEOUT": "300"}
        return Command("train", ["--prepared", str(file)], Path.cwd(), env, 1, output, output)


@pytest.fixture
def run(call, monkeypatch):
    """Runs `torchmars compare ARGS`; returns its exit code, output and errors."""
    monkeypatch.setattr(local, "start_process", start_quickly)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args):
        try:
            return call("compare", *args)
        finally:
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                os.environ.pop(name, None)

    return run
