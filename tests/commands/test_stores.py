"""Every command takes the name of a folder in an object store, S3 on the loopback here."""

import json
import os

import pytest

from tests.support.commands import ROOT, Command, run_command
from tests.support.full import FULL
from tests.support.store import BUCKET, SECRETS, s3_server
from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.config.load import config_from_tables
from torchmars.core.places import place
from torchmars.data.manifest import read_manifest
from torchmars.storage.objects import store_of

pytest.importorskip("moto")
pytest.importorskip("s3fs")

FOLDER = place(f"s3://{BUCKET}/run")


@pytest.fixture(scope="module", autouse=True)
def server():
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def tables(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    write_text(folder)
    tables = tiny_tables(
        folder,
        training={"steps": 6},
        checkpoint={"interval": 2, "folder": str(FOLDER)},
        validation={"interval": 6, "windows": 4},
    )
    train(tables, folder, 2)
    return tables


def train(tables, folder, ranks):
    """Train by the command, whose ranks know the store by the environment."""
    write_config(config_from_tables(tables, "in a test"), folder / "tiny.toml")
    environment = os.environ | {"NGPU": str(ranks), "RDZV_TIMEOUT": "300"}
    command = Command("train", [str(folder / "tiny.toml")], folder, environment, ranks)
    _, err = command.communicate()
    assert command.returncode == 0, err


def said(command, *args, cwd=ROOT):
    """What a command prints that ends well."""
    code, out, err = run_command(command, list(map(str, args)), cwd)
    assert code == 0, err
    return out


def refused(command, *args, code=2, cwd=ROOT):
    """The line of a command that is refused."""
    ended, out, err = run_command(command, list(map(str, args)), cwd)
    assert ended == code and err.count("error: ") == 1 and "Traceback" not in err, err
    assert not any(secret in out + err for secret in SECRETS.values())
    return err


def test_commands_read_a_store(tables, tmp_path):
    run = run_folder_of(tables)
    assert not (run / "checkpoints").exists()
    by_run, by_name = (said("checkpoint", "verify", each) for each in (run, FOLDER))
    assert by_run == by_name and by_run.count(": good, ") == 3
    texts = {
        said("generate", each, "--max-tokens", "8", "--temperature", "0")
        for each in (FOLDER, FOLDER / "step-00000006", run)
    }
    assert len(texts) == 1
    for source, target in ((FOLDER, "a"), (run, "b")):
        said("export", source, tmp_path / target, "--to", "safetensors")
    one, other = (tmp_path / target / "model.safetensors" for target in "ab")
    assert one.read_bytes() == other.read_bytes()
    assert "complete" in said("runs", run)


@FULL
def test_a_new_run_starts_from_a_store_and_prune_deletes_there(tables, tmp_path):
    write_text(tmp_path)
    own = {"init_from": str(FOLDER), "folder": f"s3://{BUCKET}/next", "interval": 2}
    train(tiny_tables(tmp_path, training={"steps": 4}, checkpoint=own), tmp_path, 1)
    there = place(f"s3://{BUCKET}/next")
    assert list(map(step_of, checkpoints(there))) == [2, 4]
    said("checkpoint", "prune", there, "--keep-last", "1")
    names = store_of(there).find(str(there))
    assert list(map(step_of, checkpoints(there))) == [4]
    assert all("/step-00000004/" in name for name in names)


@pytest.mark.parametrize(
    "name,code,text",
    [
        ("s3://gone/run", 2, "s3://gone/run: The specified bucket does not exist: make it"),
        (f"s3://{BUCKET}/none", 2, "is neither a checkpoint nor a run with one"),
        ("xyz://a/b", 2, "must be a path, or the name of a store as s3://BUCKET/FOLDER, or gs://"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(name, code, text):
    assert text in refused("generate", name, code=code)


def test_a_store_that_does_not_answer_may_do_so_later(tables, monkeypatch):
    """Exit code 69: a job goes back into the queue."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    err = refused("train", run_folder_of(tables) / "config.toml", code=69)
    assert "cannot be read" in err and "see that the store answers, and start again" in err


def test_mistakes_of_the_setting_are_told(tables, tmp_path):
    config = run_folder_of(tables) / "config.toml"
    err = refused("train", config, "--checkpoint.folder", "s3://me:secret@there/run")
    assert "checkpoint.folder must be a path, or the name of a store as s3://BUCKET" in err
    os.environ.pop("AWS_SECRET_ACCESS_KEY")
    err = refused("checkpoint", "verify", FOLDER)
    os.environ.update(SECRETS)
    assert "the store or its client refuses (Partial credentials found" in err


def test_the_same_tokens_are_made_of_a_corpus_in_a_store(server, tmp_path):
    """Of plain and of compressed files, and of a folder."""
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": f"fox number {number}"}) for number in range(200)]
    plain, packed = "\n".join(lines[:100]).encode(), "\n".join(lines[100:]).encode()
    files = {"a.jsonl": plain, "b.jsonl.zst": zstandard.compress(packed), "c.txt": b"no"}
    (tmp_path / "text").mkdir()
    for name, content in files.items():
        (tmp_path / "text" / name).write_bytes(content)
        store_of(FOLDER).pipe_file(f"s3://{BUCKET}/text/{name}", content)
    hashes = {}
    for source in ("text", f"s3://{BUCKET}/text", f"s3://{BUCKET}/text/*.jsonl*"):
        to = tmp_path / f"shards-{len(hashes)}"
        options = ["--source", f"jsonl:{source}", "--tokenizer", "bytes", "--path", str(to)]
        said("prepare", *options, cwd=tmp_path)
        hashes[source] = [shard.sha256 for shard in read_manifest(to).splits["train"].shards]
    assert len(set(map(tuple, hashes.values()))) == 1 and all(hashes.values())
    err = refused("prepare", "--source", f"jsonl:s3://{BUCKET}/none/*", "--tokenizer", "bytes")
    assert f"data.source: 's3://{BUCKET}/none/*' names no jsonl file" in err
