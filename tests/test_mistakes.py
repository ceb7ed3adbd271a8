"""Whatever a user gets wrong ends in one line and exit code 2: fuzzed, in process and with real commands.

Hypothesis draws the same examples in every run; the longer form (`-m slow`) draws more of them.
"""

import argparse
import contextlib
import copy
import datetime
import hashlib
import io
import json
import math
import os
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.commands import Warm
from tests.test_config import leaves
from tests.tiny import tiny_config, tiny_tables, write_config, write_text
from torchmars.build import build_meta_model, build_optimizer
from torchmars.checkpoint import __main__ as checkpoint_command
from torchmars.checkpoint.folder import checkpoints, step_folder
from torchmars.checkpoint.manifest import Manifest, describe
from torchmars.checkpoint.state import model_state, optimizer_state_names
from torchmars.config import Config
from torchmars.config_file import config_text, load_config, read_toml
from torchmars.data import corpus
from torchmars.environment import Environment, read_environment
from torchmars.errors import UserError, say_error
from torchmars.generate import load
from torchmars.launch import config_from_args, parse
from torchmars.prepare import prepare, prepare_shards

WORDS = ["", " ", "x", "two", "-1", "-0", "0", "1", "2", "3", "1.5", "1e3", "inf", "-inf", "nan", "1,2", "0,", "+4", " 2", "2 ", "1_0", "0x10",
         "٣", "²", "½", "2:4", "true", "None", "[]", "{}", "null", "9" * 20, "9" * 400, "9" * 5000, "a" * 300, "a/" * 2500, ".", "..", "/", "//", "/..",
         "~", "~nosuchuser", "/dev/null", "/dev/zero", "/proc/self/mem", "fifo", "loop", "loop/x", "file", "file/x", "folder", "nothing", "weights.safetensors",
         "fifo.safetensors", "folder.safetensors", "\x1b[31m", "a\tb", "a\nb", "error: b", "é\u2028", "\udcff", "*", "[", "**/*", "localhost:0",
         "localhost:29400", ":1", "a..b:1", "[::1]:29400", "a" * 70 + ":80", "localhost:99999", "--training.steps", "=", "%s", "$(id)"]
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 3 * 10**9, 2**53, 2**63 - 1, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e38, 1e300,
           math.inf, -math.inf, math.nan]
words, numbers = st.sampled_from(WORDS), st.sampled_from(NUMBERS)
scalars = st.one_of(words, numbers, st.booleans(), st.text(max_size=8), st.integers(), st.floats())
junk = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(words, scalars, max_size=2))

sizes = pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])


def fuzz(examples, strategy, check):
    """Call `check` with what `strategy` draws."""
    configured = settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    configured(given(strategy)(lambda drawn: check(drawn)))()


@contextlib.contextmanager
def in_time(seconds=120):
    """Fail where the body hangs, as in the opening of a FIFO."""
    def give_up(*_):
        raise AssertionError(f"it hangs: nothing in {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mistake(work, *args):
    """The line that a command ends with where `work` raises `UserError`; nothing where it raises none. Any other exception is our own mistake."""
    with in_time(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            work(*args)
            return ""
        except UserError as error:
            err.truncate(err.seek(0))
            say_error(error)
    said = err.getvalue()
    assert said.startswith("error: ") and said.endswith("\n") and said[:-1].isprintable() and len(said) < 1100
    return said


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a config, text, shards and all kinds of files that are not what they should be."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    sources = corpus._stdlib_files()[:3]
    monkeypatch.setattr(corpus, "_stdlib_files", lambda: sources)
    monkeypatch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", "nothing")
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: (_ for _ in ()).throw(OSError("no network")))
    return tmp_path


def make_place(folder):
    write_text(folder)
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "loop").symlink_to("loop")
    (folder / "file").write_text("x")
    (folder / "weights.safetensors").write_text("x")
    (folder / "folder").mkdir()
    (folder / "folder.safetensors").mkdir()
    (folder / "folder" / "other.pdf").write_text("x")
    config = tiny_config(folder, training={"steps": 1})
    prepare_shards(config)
    write_config(config, folder / "tiny.toml")


def make_checkpoint(folder, steps=2):
    """A run's checkpoint, as far as commands without ranks read it: its weights, without the optimizer's state."""
    config = load_config([str(folder / "tiny.toml")], "test")
    manifest, checkpoint = prepare_shards(config), step_folder(folder / "runs" / "tiny" / "checkpoints", steps)
    checkpoint.mkdir(parents=True)
    model = build_meta_model(config, manifest.vocab_size)
    names = optimizer_state_names(build_optimizer(config, model))
    dcp.save(model_state(model.to_empty(device="cpu")), storage_writer=dcp.FileSystemWriter(checkpoint), no_dist=True)
    files = {path.name: describe(path) for path in checkpoint.iterdir()}
    Manifest(step=steps, position=16 * steps, world_size=1, data=manifest.fingerprint(), vocab_size=manifest.vocab_size, optimizer=names,
             config=asdict(config), validation_loss=5.5, recent_losses=[5.0], files=files).write(checkpoint)
    return checkpoint


# The environment.

VARIABLES = list(Environment.__dataclass_fields__)


@sizes
def test_variables(examples):
    def check(variables):
        said = mistake(lambda: started(variables))
        assert not said or any(name in said for name in variables), said

    def started(variables):
        environment = read_environment(variables)
        assert environment.torchrun_options(environment.NGPU or 2, "job")
        config_from_args(parse([*environment.torchrun_options(environment.NGPU or 2, "job"), "script"]))

    fuzz(examples, st.dictionaries(st.sampled_from(VARIABLES), st.one_of(words, st.text(max_size=6), st.integers().map(str))), check)


NONSENSE = {"NGPU": ["", "0", "x", "9999999"], "NNODES": ["two", "-1", "1.5"], "NODE_RANK": ["-1", "x"], "MAX_RESTARTS": ["1e3", "\x1b[0m"],
            "RDZV_TIMEOUT": ["inf", "0", "45 s"], "RDZV_ENDPOINT": ["29400", "a b:1"], "LOG_RANK": ["all", "0,"], "OMP_NUM_THREADS": ["", "-4", "9" * 30],
            "CONFIG_FILE": ["", "fifo", "loop", "/dev/null", "a/" * 2500, "nothing"]}


def test_run_train_names_the_variable_that_is_wrong(place):
    """Real commands. The rest of them fails where the first does, before torch is imported."""
    from tests.test_run_train import finish

    for name, values in NONSENSE.items():
        for value in values:
            code, out, err = finish(place / "tiny.toml", **{name: value})
            assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1 and name in err, (name, value, err)


def test_variables_of_a_job_stand_in_for_those_that_are_not_set():
    job = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8", "RDZV_ENDPOINT": "n1:29400"}
    environment = read_environment(job | {"NGPU": "2"})
    assert (environment.NNODES, environment.NGPU) == (4, 2) and read_environment(job).NGPU == 8
    assert read_environment(job | {"ENVIRONMENT": ""}).NNODES == 1  # started by hand within the job
    assert "SLURM_GPUS_ON_NODE must be a whole number" in mistake(read_environment, job | {"SLURM_GPUS_ON_NODE": "gpu:8"})


# Configs.

KEYS = [name for name in leaves(Config)] + ["optimizer.groups", "run", "training", "optimizer.matrix", "nothing", "training.stps", "a.b.c.d", ""]


def nested_in(name, value):
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def merged(one, other):
    result = dict(one)
    for key, value in other.items():
        result[key] = merged(result[key], value) if isinstance(result.get(key), dict) and isinstance(value, dict) else value
    return result


changes = st.dictionaries(st.sampled_from(KEYS), st.one_of(junk, st.dates(), st.lists(st.dictionaries(st.sampled_from(["pattern", "rule", "lr", "split"]),
                          scalars), max_size=2)), max_size=2)
options = st.lists(st.tuples(st.sampled_from(KEYS), st.lists(words, max_size=3)).map(lambda option: [f"--{option[0]}", *option[1]]), max_size=2)


@sizes
def test_configs(place, examples):
    """Each is read and, where it can be, prepared; a config that is accepted reads back the same."""
    base = tiny_tables(place)

    def check(drawn):
        tables, args = drawn
        for name, value in tables.items():
            tables = merged(base, nested_in(name, value))
        with contextlib.suppress(UnicodeEncodeError, TypeError):  # what cannot be written cannot be read
            (place / "drawn.toml").write_text(tomli_w.dumps(tables or base), encoding="utf-8")
            mistake(lambda: use(["drawn.toml", *sum(args, [])]))

    def use(args):
        config = load_config(args, "test")
        (place / "again.toml").write_text(config_text(config), encoding="utf-8")
        assert config_text(load_config(["again.toml"], "test")) == config_text(config)
        prepare(config, 2, 1)

    fuzz(examples, st.tuples(changes, options), check)


@sizes
def test_texts_and_command_lines(place, examples):
    """Neither of which has to be of the right form at all."""
    text = (place / "tiny.toml").read_text()
    cut = st.tuples(st.integers(0, len(text)), st.text(max_size=5), st.integers(0, 40)).map(lambda cut: text[:cut[0]] + cut[1] + text[cut[0] + cut[2]:])
    odd = st.sampled_from(["a = " + "[" * 5000, "a = " + "{b = " * 5000, "[" + "a." * 5000 + "b]", "a = " + "9" * 5000, "a = 0x" + "f" * 5000, "\0", "\ufeff\ufeff", "a = 1e999"])

    def check(drawn):
        args, content = drawn
        (place / "drawn.toml").write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        mistake(load_config, args, "test")
        mistake(load_config, ["drawn.toml", *args], "test")

    arguments = st.lists(st.one_of(words, st.text(max_size=8), st.sampled_from([f"--{key}" for key in KEYS])), max_size=4)
    fuzz(examples, st.tuples(arguments.filter(lambda args: not {"-h", "--help"} & set(args)), st.one_of(cut, odd, st.binary(max_size=20))), check)


@pytest.mark.parametrize("args,message", [
    (["--guards.hang_seconds", "inf"], "guards.hang_seconds must be at least 0 and at most 1,000,000"),
    (["--training.steps", str(2**63)], "training.steps must be at least 1 and at most 1,000,000,000, got 9223372036854775808"),
    (["--model.n_layer", "3000000000"], "model.n_layer must be"),
    (["--model.n_embd", "3000000000"], "model.n_embd must be"),
    (["--run.seed", str(2**63)], "run.seed must be"),
    (["--optimizer.lr", "inf"], "optimizer.lr must be"),
    (["--optimizer.head.lr", "inf"], "optimizer.head.lr must be"),
    (["--optimizer.matrix.split", "0"], "optimizer.matrix.split must be at least 1, got 0"),
    (["--data.path", ""], "data.path must be the path of a file or folder"),
    (["--data.path", "/"], "data.path must be the path of a file or folder"),
    (["--data.path", "a/" * 2500], "data.path must be the path of a file or folder"),
    (["--data.path", "loop"], "data.path: loop is no folder that can be used (Too many levels of symbolic links)"),
    (["--data.path", "file"], "data.path: file is no folder that can be used (Not a directory)"),
    (["--data.path", "a" * 300], "data.path: a"),
    (["--run.folder", "fifo"], "run.folder: fifo is no folder"),
    (["--run.name", "a\0b"], "run.name must be"),
    (["--run.name", "a" * 300], "run.name must be one folder name"),
    (["--checkpoint.init_from", "fifo.safetensors"], "checkpoint.init_from: fifo.safetensors is no file that can be used (Not a regular file)"),
    (["--data.files", "~nosuchuser"], "data.files: '~nosuchuser' names no text file"),
    (["--data.files", "fifo"], "data.files: 'fifo' names no text file"),
    (["--data.files", ""], "data.files must be the path of a file or folder"),
    (["--metrics.wandb_project", "\udcff"], "metrics.wandb_project must be Unicode text"),
])
def test_what_is_too_large_and_paths_that_are_none_are_named(place, args, message):
    data = [] if "--data.path" in args else ["--data.path", "new"]
    said = mistake(lambda: prepare(load_config(["tiny.toml", *data, *args], "test"), 2, 1))
    assert message in said


@pytest.mark.parametrize("content,message", [
    ("a = " + "[" * 5000, "is nested too deeply"), ("a = " + "9" * 5000, "is not valid TOML"), ("\0", "is not valid TOML"), (None, "Not a regular file")])
def test_toml_that_breaks_the_parser(tmp_path, content, message):
    file = tmp_path / "config.toml"
    os.mkfifo(file) if content is None else file.write_text(content)
    assert message in mistake(read_toml, file)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config([str(tmp_path / "config.toml")], "test").training.steps == 7


# Manifests.

def containers(value):
    """All (table or list, key) pairs within `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        yield value, key
        yield from containers(item)


@st.composite
def altered(draw, value):
    """`value` with some of what is in it replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        owner, key = draw(st.sampled_from(range(len(list(containers(value)))))), None
        owner, key = list(containers(value))[owner]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "replace":
            owner[key] = draw(junk)
        elif action == "remove":
            del owner[key]
        elif isinstance(owner, dict):
            owner[draw(words)] = draw(junk)
        if not value:
            break
    return value


broken_texts = st.one_of(st.sampled_from(["[" * 100_000, '{"a":' * 100_000, '{"format": ' + "9" * 5000 + "}", "\ufeff{}", "[]", "null", "3", '"format"', "{}", ""]).map(str.encode),
                         st.binary(max_size=20))


@sizes
def test_manifests_of_data(place, examples):
    file, config = place / "shards" / "manifest.json", load_config(["tiny.toml"], "test")
    whole = json.loads(file.read_text())

    def check(drawn):
        file.write_bytes(drawn if isinstance(drawn, bytes) else json.dumps(drawn).encode())
        mistake(prepare, config, 2, 1)

    fuzz(examples, st.one_of(altered(whole), altered(whole), broken_texts), check)


def sealed(entries):
    """The text of a checkpoint's manifest whose checksum is right, whatever it says."""
    entries = {key: value for key, value in entries.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
    return (json.dumps(entries | {"sha256": digest}, indent=1) + "\n").encode()


@sizes
def test_manifests_of_checkpoints(place, examples):
    checkpoint = make_checkpoint(place)
    file, run = checkpoint / "manifest.json", place / "runs" / "tiny"
    whole, config = json.loads(file.read_text()), load_config(["tiny.toml"], "test")
    args = argparse.Namespace(run=run, keep_last=None, keep_every=None, damaged=True, dry_run=True)
    assert mistake(prepare, config, 2, 1) == mistake(load, run) == ""

    def check(drawn):
        file.write_bytes(drawn if isinstance(drawn, bytes) else sealed(drawn))
        mistake(prepare, config, 2, 1)
        mistake(load, run)
        for command in checkpoint_command.COMMANDS.values():
            mistake(command, args, checkpoint.parent, checkpoints(checkpoint.parent))

    fuzz(examples, st.one_of(altered(whole), altered(whole), broken_texts), check)


@pytest.mark.parametrize("change,message", [
    ({"vocab_size": 3e9}, "vocab_size must be a whole number"), ({"vocab_size": 3 * 10**9}, "vocab_size must be at least 1 and at most 65,536"),
    ({"step": "2"}, "step must be a whole number, got '2'"), ({"files": {"../x": {"size": 0, "sha256": ""}}}, "files must be one file name"),
    ({"config": {"model": {"n_layer": 3 * 10**9}}}, "model.n_layer must be"), ({"config": []}, "config must be a table")])
def test_a_forged_manifest_is_told_from_a_good_one(place, change, message):
    file = make_checkpoint(place) / "manifest.json"
    file.write_bytes(sealed(json.loads(file.read_text()) | change))
    assert message in mistake(load, place / "runs" / "tiny")


def test_a_model_that_the_checkpoint_has_not_takes_no_memory(place):
    file = make_checkpoint(place) / "manifest.json"
    whole = json.loads(file.read_text())
    whole["config"]["model"] |= {"n_embd": 500_000, "n_layer": 500}
    file.write_bytes(sealed(whole))
    assert "does not have the model that its manifest.json describes" in mistake(load, place / "runs" / "tiny")


# Commands.

NOT_DRAWN = ("guards.hang_seconds", "training.compile", "metrics", "data.tokenizer", "validation.sample_tokens")  # these take long, or the network
COMMANDS = ("train", "prepare", "plan", "generate", "export", "checkpoint.__main__", "launch")


@st.composite
def command_lines(draw):
    """A command, and arguments of which most are wrong."""
    module = draw(st.sampled_from(COMMANDS))
    flags = {"train": [], "prepare": ["--ranks", "--nodes"], "plan": ["--world-size", "--gpus-per-node"],
             "generate": ["--max_tokens", "--temperature", "--top_k", "--seed", "--prompt"], "export": [],
             "checkpoint.__main__": ["--keep_last", "--keep_every", "--damaged"],
             "launch": ["--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-conf", "--local-ranks-filter"]}[module]
    arg = words.filter(lambda word: "\0" not in word and len(word) < 6000)
    start = {"train": ["tiny.toml"], "prepare": ["tiny.toml"], "plan": ["tiny.toml", "--world-size", "2"], "generate": ["runs/tiny"],
             "export": ["runs/tiny", "out.safetensors"], "checkpoint.__main__": [draw(st.sampled_from(["list", "verify", "prune", "x"])), "runs/tiny"],
             "launch": ["--nproc-per-node", "0"]}[module]
    if module in ("train", "prepare", "plan"):
        flags += [f"--{key}" for key in KEYS if not key.startswith(NOT_DRAWN)]
    args = [*start]
    if draw(st.booleans()) and module != "launch":
        args[-1] = draw(arg)
    for _ in range(draw(st.integers(0, 2))):
        if flags:
            args += [draw(st.sampled_from(flags)), draw(arg)]
    return module, args + (["-m", "torchmars.train", "tiny.toml"] if module == "launch" else [])


@pytest.fixture(scope="module")
def warm():
    with Warm() as process:
        yield process


@pytest.mark.parametrize("examples", [35, pytest.param(500, marks=pytest.mark.slow)])
def test_commands(tmp_path, warm, examples):
    """Real ones, in processes of their own."""
    make_place(tmp_path)
    made = make_checkpoint(tmp_path)
    kept = shutil.copytree(made, tmp_path / "kept")
    seen = set()

    def check(drawn):
        module, args = drawn
        code, out, err = warm.run(module, args, tmp_path)
        wrong = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
        assert code in (0, 2) and len(wrong) == (code == 2) and "Traceback" not in err + out, (code, err)
        seen.add((module, code))
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(kept, made)

    fuzz(examples, command_lines(), check)
    assert {module for module, code in seen if code == 2} == set(COMMANDS)


@pytest.mark.parametrize("module", [*COMMANDS, "environment"])
def test_help_that_nobody_reads_to_its_end(warm, tmp_path, module):
    for args in (["--help"], ["list", "--help"]) if module == "checkpoint.__main__" else (["--help"],):
        code, out, err = warm.run(module, args, tmp_path)
        assert code == 0 and len(out) > 100 and err == ""
        assert warm.run(module, args, tmp_path, unread=True) == (0, "", "")


def test_output_that_nobody_reads_to_its_end(warm, place):
    make_checkpoint(place)
    for module, args in {"generate": ["runs/tiny"], "checkpoint.__main__": ["list", "runs/tiny"], "plan": ["tiny.toml", "--world-size", "2"]}.items():
        assert warm.run(module, args, place, unread=True) == (0, "", "")
