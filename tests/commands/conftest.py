"""What tests of commands share: folders to work in."""

import multiprocessing.util
import os
import tempfile
from pathlib import Path

import pytest

from tests.support.mistakes import make_place
from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.data import corpus


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder as `make_place` makes it, with little in Python's library and no network."""

    def no_network(name):
        raise OSError("no network")

    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:3]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "_stdlib_files", lambda: sources)
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    make_place(tmp_path)
    return tmp_path


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """An empty folder for temporary files."""
    # multiprocessing keeps the folder of its sockets. In this one their paths would be too long.
    multiprocessing.util.get_temp_dir()
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def config(tmp_path):
    """The file of a run of 4 steps with validation and samples."""
    write_text(tmp_path)
    file = tmp_path / "tiny.toml"
    write_config(
        tiny_config(
            tmp_path, training={"steps": 4}, validation={"interval": 2, "sample_tokens": 5}
        ),
        file,
    )
    return file
