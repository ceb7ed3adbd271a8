"""Names of stores in all options and arguments, and folders that lead elsewhere."""

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import pytest
import tomli_w

from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import folder_of, tell_once
from torchmars.config.load import config_from_tables

KEY, SECRET = "AKIAOFNOBODY", "wJalrXUt/K7MDENG"
# What a user may write, with NAME in place of the name.
LINES = [
    line.split()
    for line in (
        *("checkpoint verify NAME", "checkpoint prune NAME"),
        *("checkpoint NAME", "generate NAME", "generate x --prompts NAME", "generate x NAME"),
        *("generate x --foldr=NAME", "generate x --max-tokens NAME", "export NAME out"),
        *(
            "export x NAME",
            "import NAME c.toml",
            "import x NAME",
            "runs NAME",
            "runs . --json NAME",
        ),
        *("plot NAME", "plot . --out NAME", "plot . --html --out NAME"),
        *(
            "evaluate NAME --text x",
            "evaluate x --text x --json NAME",
            "evaluate x --tasks NAME.yaml",
        ),
        *("train NAME", "train tiny.toml NAME", "bench NAME"),
        *(
            "plan NAME --world-size 2",
            "plan more.toml --world-size 2",
        ),
        *("compare tiny.toml --lr-grid 1e-3 --folder NAME", "launch -m torchmars.train NAME"),
        *("compare tiny.toml --lr-grid 1e-3 --optimizers NAME",),
        *("prepare --source text --files NAME --tokenizer bytes", "prepare --source NAME"),
        *(
            f"prepare --source {kind}:NAME"
            for kind in ("text", "jsonl", "hf", "nanogpt", "megatron")
        ),
        *(
            f"plan tiny.toml --world-size 2 --{setting}"
            for setting in (
                *("checkpoint.folder NAME", "checkpoint.init_from NAME", "run.folder NAME"),
                *("checkpoint.init_from hf:NAME", "checkpoint.init_from NAME.safetensors"),
                *("run.name NAME", "data.path NAME", "data.tokenizer NAME", "run.plugins NAME"),
                *("evaluation.tasks NAME.yaml", "checkpoint.foldr=NAME"),
            )
        ),
    )
]
NAMES = [f"s3://{KEY}:{SECRET}@b/x", f"S3://{KEY}@b", f"s3:{KEY}:{SECRET}@b", f"http://{KEY}:x@h/x"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A config, in the current folder."""
    write_text(tmp_path)
    config = config_from_tables(tiny_tables(tmp_path, training={"steps": 1}), "in a test")
    write_config(config, tmp_path / "tiny.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # no cloud is asked for a key
    for library in ("datasets.config", "huggingface_hub.constants"):  # nor a hub for data
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", True)
    return tmp_path


def ended(line, monkeypatch, capsys):
    """How a command ends in this process: its code, and what it printed."""
    command, *args = line
    monkeypatch.setattr(sys, "argv", [command, *args])
    with pytest.raises(SystemExit) as end:
        import_module(f"torchmars.commands.{command.replace('-', '_')}").main()
    return end.value.code, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_a_secret_is_refused_wherever_it_stands(place, monkeypatch, capsys, name):
    (place / "more.toml").write_text(tomli_w.dumps({"extends": ["tiny.toml", name]}))
    before = sorted(place.rglob("*"))
    for line in LINES:
        words = [word.replace("NAME", name) for word in line]
        code, said = ended(words, monkeypatch, capsys)
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, (words, said)
        assert not any(part in said for part in SECRET.split("/")), (words, said)
        assert sorted(place.rglob("*")) == before, words


def test_a_mistake_of_a_mixture_repeats_no_secret(place, monkeypatch, capsys):
    tables = tiny_tables(place)
    part = {"source": f"text:s3://{KEY}:{SECRET}@b/x", "weight": 1}
    tables["data"] = {"mixture": [part, part]}
    (place / "mixture.toml").write_text(tomli_w.dumps(tables))
    code, said = ended(["train", "mixture.toml"], monkeypatch, capsys)
    assert code == 2 and "two tables of data.mixture are called 'text:s3://...@b/x'" in said


@pytest.fixture
def server():
    """The address of a server of the loopback, and what it is asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *unused): ...

    for method in ("HEAD", "POST", "PUT", "DELETE"):
        setattr(Handler, f"do_{method}", Handler.do_GET)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


STRANGE = (
    *(
        "http://HOST/x",
        "HTTP://HOST/x",
        "webhdfs://HOST/x",
        "jupyter://HOST/?token=x",
        "ftp://HOST/x",
    ),
    *("zip::http://HOST/x.zip", "reference://http://HOST/x", "simplecache::http://HOST/x"),
    *("s3://HOST/x", "s3://b/x?endpoint_url=http://HOST", "hdfs://HOST/x", "memory://x"),
    *("abfs://c@HOST/x", "github://a:b@HOST/x", "file://HOST/x"),
)


def test_a_strangers_run_sends_no_request(place, monkeypatch, capsys, server):
    """Its config names a place of its own for the checkpoints."""
    host, asked = server
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
    run = run_folder_of(tiny_tables(place))
    run.mkdir(parents=True)
    for name in STRANGE:
        named = {"folder": name.replace("HOST", host)}
        tables = tiny_tables(place) | {"checkpoint": named}
        (run / "config.toml").write_text(tomli_w.dumps(tables))
        for line in (
            *(["checkpoint", "verify", str(run)], ["generate", str(run)]),
            *(["export", str(run), "out"], ["evaluate", str(run), "--text", "x"]),
        ):
            code, said = ended(line, monkeypatch, capsys)
            assert code == 2 and said.count("\n") == 1, (line, name, said)
            assert f"{run}/config.toml: checkpoint.folder must " in said and name not in said
    assert asked == []


def test_a_strangers_run_in_a_store_is_said_to_be_there(place, capsys):
    run = run_folder_of(tiny_tables(place))
    run.mkdir(parents=True)
    tables = tiny_tables(place) | {"checkpoint": {"folder": "s3://b/x"}}
    (run / "config.toml").write_text(tomli_w.dumps(tables))
    tell_once.cache_clear()
    assert [str(folder_of(run)) for _ in range(2)] == ["s3://b/x"] * 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"the checkpoints are read from s3://b/x, as {run}/config.toml says\n",
    )
