"""Data sets of the hub where there is no network: a line and code 2, soon."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.commands import ROOT
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.data.corpus import load_dataset
from torchmars.data.hub import hub_or_cache, hub_problem
from torchmars.evaluation.rows import read_tasks

datasets = pytest.importorskip("datasets")


@pytest.fixture
def closed():
    """The address of a port at which nobody listens, and nobody can until the test ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(403)

    def log_message(self, *_):
        pass


def greet(listener):
    connection, _ = listener.accept()
    with connection:
        connection.recv(2**16)
        connection.sendall(b"220 hello\r\n")


def test_any_answer_is_a_hub_and_none_is_a_problem(closed):
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request).start()
        assert hub_problem(f"http://127.0.0.1:{server.server_port}") == ""
    with socket.create_server(("127.0.0.1", 0)) as other:  # that speaks another language
        threading.Thread(target=greet, args=(other,)).start()
        assert hub_problem(f"http://127.0.0.1:{other.getsockname()[1]}") == ""
    assert hub_problem(closed) == f"{closed} cannot be reached ([Errno 111] Connection refused)"
    assert "cannot be reached" in hub_problem("http://no-such-host.invalid")
    assert "cannot be reached" in hub_problem("no address")


def test_without_a_hub_the_cache_alone_is_asked(closed, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", closed)
    asked = []

    def load(*_, **__):
        asked.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        raise ConnectionError("offline")

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=f"load the task baber/piqa .*{closed} cannot be reached"):
        read_tasks(["piqa"])
    assert asked == [(True, True)]
    assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == before
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "one two"}])
    [(_, [question])] = read_tasks(["lambada"]).items()  # as it is in the cache
    assert question.answers == ("two",)


def test_a_data_set_is_not_asked_for_again_and_again(closed, monkeypatch, capfd, tmp_path):
    """One of the hub: a local one needs no hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", closed)
    asked = []

    def load(*_, **__):
        asked.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name, reason in (("a/b", f"{closed} cannot be reached"), (str(tmp_path), "check its name")):
        load_dataset.cache_clear()
        with pytest.raises(UserError, match=rf"data set {name} \(Conn.*offline\): {reason}"):
            load_dataset(parse_source(f"hf:{name}"))
    assert asked == [True, False] and capfd.readouterr() == ("", "")
    load_dataset.cache_clear()


def test_who_has_asked_for_the_cache_is_not_asked_for_a_hub(closed, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with hub_or_cache() as problem:
        assert problem == "" and constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE


@pytest.mark.full
@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HTTPS_PROXY": "closed"}])
def test_the_command_ends_with_2(closed, variables, tmp_path):
    proxies = {name: value.replace("closed", closed) for name, value in variables.items()}
    env = os.environ | proxies | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "torchmars", "evaluate", "no-run", "--tasks", "piqa"]
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert "cannot load the task baber/piqa from the hub" in ended.stderr
