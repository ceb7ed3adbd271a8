"""Real text prepared again and again, and a corpus that is larger than memory may be."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.data.real_corpus import make_corpus, prepare_and_watch
from tests.support.real_data import FOLDER, needs_data
from torchmars.core.files import sha256

PREPARE = [sys.executable, "-m", "torchmars", "prepare"]


@pytest.fixture
def bpe_files(tmp_path, monkeypatch):
    """Tiktoken deletes what it finds damaged, so it gets a copy."""
    shutil.copytree(FOLDER / "tiktoken_cache", tmp_path / "cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@needs_data("books", "tiktoken_cache")
def test_books_are_the_same_however_they_are_prepared(tmp_path, bpe_files):
    source = ["--source", f"text:{FOLDER}/books/train.txt", "--tokenizer", "gpt2"]

    def start(name, *options):
        return subprocess.Popen([*PREPARE, *source, "--path", str(tmp_path / name), *options])

    def files(name):
        assert not (tmp_path / name / "plan.json").exists()
        return {file.name: sha256(file) for file in (tmp_path / name).iterdir()}

    def done(name):
        records = (tmp_path / name).glob("part-*.json")
        splits = (json.loads(each.read_text())["splits"].values() for each in records)
        return sum(split["text_bytes"] for each in splits for split in each)

    assert start("one", "--processes", "1").wait() == 0
    assert len(files("one")) == 4  # of three pieces, and the manifest
    for count in ("2", "4"):
        assert start(count, "--processes", count).wait() == 0
        assert files(count) == files("one")
    for task in ("2", "0", "1"):
        assert start("tasks", "--task", task, "--tasks", "3").wait() == 0
    assert files("tasks") == files("one")
    for goal in (1, 2e7, 3e7):
        running = start("killed")
        while done("killed") < goal:
            assert running.poll() is None
        running.kill()
        running.wait()
    assert start("killed").wait() == 0
    assert files("killed") == files("one")


@pytest.mark.slow
def test_memory_of_a_large_corpus(tmp_path):
    """5 GB of JSON lines, by GPT-2's tokenizer where its files are at hand."""
    file = tmp_path / "corpus.jsonl.zst"
    make_corpus(file, 5 * 10**9)
    tokenizer = "gpt2" if os.environ.get("TIKTOKEN_CACHE_DIR") else "bytes"
    peak, worker, said = prepare_and_watch(f"jsonl:{file}", tmp_path / "shards", tokenizer)
    print(f"{said}peak memory {peak:.0f} MiB, largest worker {worker:.0f} MiB")
    assert peak < 1024 and worker < 1024
