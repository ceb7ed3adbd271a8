"""A hub that HF_ENDPOINT names may be anybody's: it writes in its own cache alone."""

import json
from pathlib import Path

import pytest

from tests.exchange.test_hub import ask
from tests.support.hub_server import hub_server
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.data.reading import load_dataset
from torchmars.evaluation.tasks import Tasks
from torchmars.exchange.folder import find_folder

datasets = pytest.importorskip("datasets")
CODE = b"raise SystemExit('a hub has written this')"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model and a data set whose files are code, and an empty cache."""
    from huggingface_hub import constants

    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(CODE)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    with hub_server() as (server, address):
        server.models |= {"own/model": tmp_path / "model", "datasets/own/rows": tmp_path / "rows"}
        ask(address, tmp_path / "cache", monkeypatch.setattr)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        load_dataset.cache_clear()
        yield server
        load_dataset.cache_clear()


@pytest.fixture
def path(tmp_path):
    """A folder that Python looks for modules in."""
    (tmp_path / "path").mkdir()
    return tmp_path / "path"


def header(name, file="config.json"):
    """Let the answer for a file have `value` as a header."""

    def change(value, asked, headers, had):
        if asked.endswith(file):
            headers[name] = f'"{value}"' if "tag" in name else value
        return had

    return change


def second_only(value, asked, headers, had):
    """Answer well at first, and badly then."""
    if asked.endswith("model.safetensors"):
        headers["ETag"] = f'"{value}"'
    return had


def commit(value, asked, headers, had):
    return had | {"sha": value} if isinstance(had, dict) and "sha" in had else had


def missing(value, asked, headers, had):
    """Name a file that is not there, with a commit."""
    if "/tree/" in asked:
        return had + [{"type": "file", "path": "tokenizer.json", "size": 1, "oid": "0" * 40}]
    if asked.endswith("tokenizer.json"):
        headers["X-Repo-Commit"] = value
    return had


def listed(value, asked, headers, had):
    """Name a file in the list of files, with which no answer for the file itself is asked for."""
    large = {"lfs": {"oid": value, "size": 1, "pointerSize": 1}, "xetHash": "0" * 64}
    return [each | large for each in had] if "/tree/" in asked else had


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (header("ETag"), "ETag"),
        (header("X-Linked-Etag"), "ETag"),
        (header("X-Repo-Commit"), "X-Repo-Commit"),
        (second_only, "ETag"),
        (missing, "X-Repo-Commit"),
        (commit, "sha"),
        (listed, "oid"),
    ],
)
@pytest.mark.parametrize("up", ["", "../../../path"])
def test_a_model_is_written_in_the_cache_alone(hub, path, change, said, up):
    hub.change = lambda *answer: change(f"{up or path}/sitecustomize.py", *answer)
    with pytest.raises(UserError, match=rf"the hub 127.0.0.1 answers .* with the {said} .*HF_END"):
        find_folder("hf:own/model")
    assert [*path.iterdir()] == []


def load_rows():
    return list(load_dataset(parse_source("hf:own/rows")))


def load_task():
    task = {"task": "own", "dataset_path": "own/rows", "test_split": "train"}
    settings = {"output_type": "loglikelihood_rolling", "doc_to_target": "text"}
    Path("own.yaml").write_text(json.dumps(task | settings))
    return Tasks(["own.yaml"])


@pytest.mark.parametrize("load", [load_rows, load_task])
@pytest.mark.parametrize(
    "change", [header("ETag", "README.md"), header("X-Repo-Commit", "README.md"), commit]
)
def test_a_data_set_is_written_in_the_cache_alone(hub, path, tmp_path, load, change):
    if change is not commit:
        (tmp_path / "rows" / "README.md").write_bytes(CODE)
    hub.change = lambda *answer: change(f"{path}/sitecustomize.py", *answer)
    with pytest.raises(UserError, match="the hub 127.0.0.1 answers .*set HF_ENDPOINT"):
        load()
    assert [*path.iterdir()] == []


@pytest.mark.parametrize("etag", ['"abc-12"', 'W/"abc"', "abc_DEF"])
def test_what_hubs_answer_is_taken(hub, etag):
    """Of an answer that there is no such file, the ETag may be anything."""

    def change(asked, headers, had):
        if "/resolve/" in asked:
            headers["ETag"] = etag if "X-Error-Code" not in headers else 'W/"f-a/b+c="'
        return had

    hub.change = change
    folder, _ = find_folder("hf:own/model")
    assert (folder / "config.json").read_bytes() == CODE
    assert [row["text"] for row in load_rows()] == ["one", "two"]
