"""torchmars from Python: what a notebook does, beside what the commands do."""

import json
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchmars
from tests.support.commands import finish_run, run_command
from tests.support.full import FULL
from tests.support.tasks import foxes, write_task
from tests.support.tiny import metrics, tiny_tables, write_config, write_text
from torchmars import api
from torchmars.config.load import config_from_tables
from torchmars.core import files

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    write_text(folder)
    return tiny_tables(folder, validation={"interval": 10})


@pytest.fixture(scope="module")
def config(tables, tmp_path_factory):
    """The file of a tiny run."""
    file = tmp_path_factory.mktemp("config") / "tiny.toml"
    write_config(config_from_tables(tables, "in a test"), file)
    return file


@pytest.fixture(scope="module")
def run(config):
    """That run, trained in this process."""
    return torchmars.run_training(config)


@pytest.fixture(scope="module")
def model(run):
    return torchmars.load(run.folder, device="cpu")


def test_a_run_in_this_process_is_that_of_the_command(run, config, tables):
    code, _, err = finish_run(config, "--run.name", "command", ranks=1, NGPU="1")
    assert code == 0, err
    expected = metrics(tables | {"run": tables["run"] | {"name": "command"}})
    loss = run.series["train/loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist())) == expected
    assert loss.values[-1] < loss.values[0] - 1


@FULL
def test_ranks_of_the_launcher_train_the_same_run(run, config):
    other = torchmars.run_training(config, ranks=2, run={"name": "two"})
    assert other.name == "two" and other.last_step == 20
    np.testing.assert_allclose(
        other.series["train/loss"].values, run.series["train/loss"].values, rtol=1e-5
    )
    with pytest.raises(RuntimeError, match="ended with code 2"):
        torchmars.run_training(config, ranks=3, run={"name": "three"})  # 16 sequences on 3 ranks


def test_calling_again_goes_on_or_is_done(run, config):
    again = torchmars.run_training(config)
    assert again.last_step == run.last_step == 20
    longer = torchmars.run_training(str(config), training={"steps": 21})
    assert longer.last_step == 21


def lock_threads():
    """Those that hold a run's lock in this process."""
    return {each for each in threading.enumerate() if each.name == "lock"}


def test_another_process_can_go_on_with_a_run_of_this_one(run, config):
    """Also after a call that found nothing to do."""
    before = lock_threads()
    for _ in range(2):
        torchmars.run_training(config)
        assert not files.is_locked(run.folder / "lock")
        assert lock_threads() <= before


def test_a_thread_trains_the_same_run(run, config):
    """Signals are the program's then. A second one at the same time is refused."""
    found = []

    def train():
        found.append(torchmars.run_training(config, run={"name": "thread"}))

    before = signal.getsignal(signal.SIGTERM)
    with api.own_group(), pytest.raises(torchmars.UserError, match="one at a time"):
        torchmars.run_training(config, run={"name": "second"})
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(
        found[0].series["train/loss"].values, run.series["train/loss"].values
    )
    assert found[0].checkpoints == [20] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, torchmars.UserError, ValueError])
def test_a_call_that_fails_leaves_the_run_to_others(config, monkeypatch, error):
    """Whatever ends it."""

    def fail(*args):
        raise error

    name, before = f"failing-{error.__name__}", lock_threads()
    with monkeypatch.context() as patch:
        patch.setattr("torchmars.training.build.introduction", fail)
        with pytest.raises(error):
            torchmars.run_training(config, run={"name": name})
    assert lock_threads() <= before
    with monkeypatch.context() as patch:
        patch.setattr("torchmars.training.checkpointer.Checkpointer.load_newest", fail)
        with pytest.raises(error):
            torchmars.run_training(config, run={"name": name})
    assert lock_threads() <= before


def test_a_network_that_is_not_there_does_not_end_the_program(config, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    with pytest.raises(torchmars.UserError, match="Unable to find address for: nothing.*set GLOO"):
        torchmars.run_training(config, run={"name": "unconnected"})


@pytest.mark.parametrize("code", [-signal.SIGINT, 130, 75, 2])
def test_ctrl_c_is_that_whatever_the_launcher_ends_with(config, monkeypatch, code):
    """At its start it imports, and has nothing to save."""
    sent = []

    class Launcher:
        def send_signal(self, number):
            sent.append(number)

        def wait(self):
            if not sent:
                raise KeyboardInterrupt
            return code

    monkeypatch.setattr(api, "start_launcher", lambda *args: Launcher())
    with pytest.raises(KeyboardInterrupt):
        torchmars.run_training(config, ranks=2)
    assert sent == [signal.SIGINT]


def test_curves_are_those_of_the_file(run):
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    found = torchmars.read_run(str(run.folder)).series["validation/loss"]
    expected = [
        (json.loads(line)["step"], json.loads(line).get("validation/loss")) for line in lines
    ]
    expected = [pair for pair in expected if pair[1] is not None]
    assert list(zip(found.steps.tolist(), found.values.tolist())) == expected


def test_what_is_printed_of_a_run_and_of_a_model_is_one_line(run, model):
    found = torchmars.read_run(run.folder)
    assert repr(found) == f"Run({str(run.folder)!r}: {found.last_step} of {found.steps} steps)"
    assert repr(model).startswith(f"LanguageModel({str(model.folder)!r}: gpt2 nano except n_layer")


def test_greedy_text_follows_from_the_logits(model):
    ids = list(b"It was")
    for _ in range(6):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    assert model.generate("It was", max_tokens=6, temperature=0) == bytes(ids[6:]).decode()
    both = model.generate(["It was", "It"], max_tokens=6, temperature=0)
    assert both[0] == bytes(ids[6:]).decode() and len(both) == 2
    assert model.logits("It was").shape == (6, 320)
    assert torch.equal(model.logits("It was"), model.logits(torch.tensor([list(b"It was")]))[0])


def test_the_loss_on_a_text_follows_from_the_logits(model, tmp_path):
    text = b"it was so"
    (tmp_path / "text.txt").write_bytes(text)
    file = str(tmp_path / "text.txt")
    ids: Tensor = torch.tensor([256, *text])
    expected = F.cross_entropy(model.logits(ids[None, :-1])[0].double(), ids[1:])
    found = model.evaluate(text=file)[file]
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["tokens"] == len(text)


def test_tasks_are_measured_by_name(model, tmp_path):
    file = write_task(tmp_path, "mine", "multiple_choice", foxes(4))
    found = model.evaluate([file], shots=1, limit=3)
    assert found["mine"].keys() == {
        "sample_len",
        "acc",
        "acc_stderr",
        "acc_norm",
        "acc_norm_stderr",
    }
    assert found["mine"]["sample_len"] == 3
    assert model.evaluate(file, shots=1, limit=3) == found
    assert model.generate([]) == []


def test_a_plan_is_that_of_the_command(config):
    plan = torchmars.make_plan(config, 4, parallelism={"tp": 2})
    options = ["--world-size", "4", "--parallelism.tp", "2"]
    code, out, _ = run_command("plan", [str(config), *options], config.parent)
    assert code == 0 and str(plan) + "\n" == out and plan.peak > 0


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: torchmars.run_training("no.toml"), "cannot read the config no.toml"),
        (
            lambda: torchmars.run_training([], optimiser={"lr": 1}),
            "unknown section optimiser",
        ),
        (
            lambda: torchmars.run_training([], optimizer={"lr": -1}),
            "optimizer.lr must be more",
        ),
        (lambda: torchmars.load("nowhere"), "nowhere"),
        (lambda: torchmars.read_run(Path("nowhere")), "nowhere is not the folder of a run"),
    ],
)
def test_a_mistake_is_one_line(call, message):
    with pytest.raises(torchmars.UserError, match=message) as found:
        call()
    assert "\n" not in str(found.value)


def test_settings_of_a_sample_out_of_range_are_refused(model):
    for settings, message in {
        ("temperature", -1.0): "temperature must be greater than or equal to 0, got -1",
        ("top_p", 0.0): "top_p must be greater than 0",
        ("max_tokens", 0): "max_tokens must be greater than or equal to 1, got 0",
    }.items():
        with pytest.raises(torchmars.UserError, match=message):
            model.generate("a", **dict([settings]))


def test_more_tokens_than_the_model_sees_are_refused(model):
    with pytest.raises(torchmars.UserError, match="33 tokens: the model sees 32"):
        model.logits("x" * 33)


@FULL
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its quickstart.toml is a small one here."""
    write_text(tmp_path)
    (tmp_path / "quickstart.toml").write_text(
        '[model]\nn_layer = 1\nn_head = 2\nn_embd = 32\n[data]\nsource = "text:text.txt"\n'
        "[training]\nglobal_batch_size = 8\nseq_len = 128\n[validation]\ninterval = 100\n"
        "[metrics]\nlog_interval = 100\n"
    )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "notebook.py"))
    out = capsys.readouterr().out
    assert "validation loss {100: " in out and "MiB at the peak" in out and "bits_per_byte" in out


IMPORT = """
import sys
import torchmars
assert not {"torch", "numpy", "pydantic"} & set(sys.modules)
print(torchmars.__version__)
for name in torchmars.__all__:
    getattr(torchmars, name)
"""


def test_importing_the_package_imports_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == torchmars.__version__ and "MARS" in torchmars.__all__
