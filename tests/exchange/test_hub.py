"""hf:NAME: a folder of that name, or a model of a hub, which here is a server of this machine."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.exchange.hub_server import hub_server
from tests.exchange.test_hostile_folders import MODELS, make_folder
from tests.exchange.test_initial import started
from tests.support.mistakes import mistake
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_tables, write_text
from tests.support.tokenizers import letters
from torchmars.begin import install_command
from torchmars.config.load import config_from_tables
from torchmars.exchange.saved_model import FILES, find_folder, open_any, open_folder
from torchmars.training.build import resolve_source
from torchmars.training.preparation import prepare_run

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has the model own/llama, and its address; the cache is empty."""
    make_folder(tmp_path / "there", MODELS["llama"])
    letters().save(str(tmp_path / "there" / "tokenizer.json"))
    (tmp_path / "there" / "pytorch_model.bin").write_bytes(b"may run code")
    (tmp_path / "there" / "model.fp16.safetensors").write_bytes(b"a variant")
    monkeypatch.chdir(tmp_path)
    with hub_server() as (server, address):
        server.models["own/llama"] = tmp_path / "there"
        ask(address, tmp_path / "cache", monkeypatch.setattr)
        yield server, address


def ask(address, cache, set_attribute=setattr):
    """Let the library, which is imported, ask this hub."""
    from huggingface_hub import constants

    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")[2]
    set_attribute(constants, "ENDPOINT", address)
    set_attribute(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}{files}")
    set_attribute(constants, "HF_HUB_CACHE", str(cache))


def test_a_model_is_fetched_once_without_pickles(hub):
    server, _ = hub
    commit = server.commit("own/llama")
    folder, pinned = find_folder("hf:own/llama")
    assert pinned == f"hf:own/llama@{commit}"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json")
    }
    assert not any(name in path for path in server.asked for name in (".bin", "fp16"))
    asked = len(server.asked)
    assert find_folder(pinned) == (folder, pinned)
    assert find_folder("hf:own/llama@main") == (folder, pinned)
    assert not [path for path in server.asked[asked:] if "/resolve/" in path]


def test_a_folder_of_that_name_wins(hub, tmp_path):
    server, _ = hub
    for name in ("there", "own/llama"):
        (tmp_path / "own").mkdir(exist_ok=True)
        if name != "there":
            shutil.copytree(tmp_path / "there", tmp_path / name)
        found = open_folder(Path(f"hf:{name}"))
        assert found.tables["checkpoint"] == {"init_from": f"hf:{tmp_path / name}"}
        assert resolve_source(f"hf:{name}", None) == f"hf:{name}"
    assert not server.asked


def test_an_import_names_the_commit(hub, tmp_path):
    server, _ = hub
    found = open_any(Path("hf:own/llama"))
    assert found.tables["run"] == {"name": "llama"}
    assert found.tables["checkpoint"] == {"init_from": f"hf:own/llama@{server.commit('own/llama')}"}
    assert found.tables["data"]["tokenizer"].endswith("/tokenizer.json")


def test_a_run_starts_from_the_hub_and_keeps_the_commit(hub, tmp_path):
    server, address = hub
    write_text(tmp_path)
    first = server.commit("own/llama")
    model = open_folder(tmp_path / "there").tables["model"]
    checkpoint = {"init_from": "hf:own/llama"}
    config = tiny_config(tmp_path, model=model, checkpoint=checkpoint)
    assert mistake(prepare_run, config, 2, 1) == ""
    tables = tiny_tables(tmp_path, model=model, checkpoint=checkpoint)
    [weights, source], _ = run_ranks(start_from_hub, 2, address, tmp_path / "cache", tables)
    theirs = load_file(tmp_path / "there" / "model.safetensors")
    assert torch.equal(weights["norm.weight"], theirs["model.norm.weight"])
    assert source == f"hf:own/llama@{first}"
    # The model there changes.
    config_file = tmp_path / "there" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"new": 1}))
    assert resolve_source("hf:own/llama", None) == f"hf:own/llama@{server.commit('own/llama')}"
    asked = len(server.asked)
    assert resolve_source("hf:own/llama", {"checkpoint": {"init_from": source}}) == source
    assert resolve_source("hf:own/other", {"checkpoint": {"init_from": source}}) == "hf:own/other"
    assert resolve_source("hf:own/llama", {"checkpoint": {}}) == "hf:own/llama"
    assert len(server.asked) == asked  # a run that goes on needs no hub


def start_from_hub(address, cache, tables):
    ask(address, cache)
    _, _, weights, _, origin = started(tables)
    config = config_from_tables(tables, "in a test")
    assert origin.endswith("weights of " + resolve_source(config.checkpoint.init_from, None))
    return weights, origin.rpartition(" ")[2]


@pytest.mark.parametrize("source", ["hf:own/none", "hf:own/llama@none", "hf:none"])
def test_what_a_hub_has_not_is_one_line(hub, source):
    said = mistake(lambda: find_folder(source))
    name = source.removeprefix("hf:")
    assert f"there is no folder {name}: the model of the hub cannot be fetched (" in said
    assert "NotFoundError" in said and "check the name and the network" in said


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_a_folder_that_is_not_there_may_be_one_of_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    line = f"there is no folder {name}: hf:{name} names that model of the hub"
    assert line in mistake(open_folder, Path(name))
    path = tmp_path / name
    assert mistake(open_folder, path).endswith(f"there is no folder {path}\n")


def test_no_network_and_no_package_are_one_line(hub, tmp_path, monkeypatch):
    folder, pinned = find_folder("hf:own/llama")
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ask(address, tmp_path / "cache", monkeypatch.setattr)
        assert find_folder(pinned)[0] == find_folder("hf:own/llama")[0] == folder
        assert "cannot be fetched (" in mistake(lambda: find_folder("hf:own/other"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = mistake(lambda: find_folder("hf:own/other"))
    assert f"needs the package huggingface_hub: {install_command('data')}" in said


def test_the_patterns_are_the_files_that_are_read():
    assert "model-*-of-*.safetensors" in FILES
    assert not any(name.startswith("*") or ".bin" in name for name in FILES)
