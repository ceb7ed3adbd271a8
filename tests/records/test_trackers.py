"""Trackers end no run, and an account that is missing is known before the work."""

import errno
import sys
import types
from contextlib import nullcontext

import pytest

import torchmars
from tests.support.full import full_but
from tests.support.tiny import metrics, tiny_config, tiny_tables, write_text
from torchmars.config import MetricsConfig
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.records import trackers
from torchmars.records.trackers import check_trackers, open_trackers

KEY = "0123456789" * 4


def full_disk():
    return OSError(errno.ENOSPC, "No space left on device")


def fake_wandb(monkeypatch, init):
    """Let `init` take the place of `wandb.init`, where an account is known."""
    settings = types.SimpleNamespace(mode="online", sync_dir="here")

    def setup(given):
        assert given == {"silent": True}
        return types.SimpleNamespace(settings=settings)

    fake = types.SimpleNamespace(
        init=init,
        Settings=lambda **given: given,
        setup=setup,
        login=lambda **given: True,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "9")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)


class FakeRun:
    """What `wandb.init` gives; one of its calls, or none, fails."""

    offline, url = False, "https://wandb.ai/our-team/books"

    def __init__(self, failing, error):
        self.failing, self.error, self.calls = failing, error, []

    def call(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise self.error
        return self

    def init(self, **settings):
        return self.call("init")

    def log(self, values, step):
        self.call("log")

    def finish(self):
        self.call("finish")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No account of W&B, and nothing that says how to use it."""
    for name in ("API_KEY", "MODE", "BASE_URL", "IDENTITY_TOKEN_FILE", "DIR", "CONFIG_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "is_missing", lambda name: False)
    return tmp_path


def used(config, start=0, steps=(1, 2, 3), reached=0):
    """Open the trackers of a config, and use them for some steps."""
    config.run.path.mkdir(parents=True, exist_ok=True)
    opened = open_trackers(config, start, reached)
    for step in steps:
        for each in opened:
            each.write(step, {"train/loss": 1.0})
    for each in opened:
        each.close()


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("gone\nfor good")])
def test_a_failure_of_wandb_is_told_once(alone, monkeypatch, capsys, failing, error):
    fake = FakeRun(failing, error)
    fake_wandb(monkeypatch, fake.init)
    used(tiny_config(alone, metrics={"wandb": True}))
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("warning: metrics.wandb has failed")
    assert type(error).__name__ in err
    assert out == ("" if failing == "init" else f"wandb     {fake.url}\n")
    order = ["init", "log", "log", "log", "finish"]
    assert fake.calls == order[: order.index(failing) + 1]


@pytest.mark.parametrize("failing", ["__init__", "add_scalar", "close"])
def test_a_failure_of_tensorboard_is_told_once(alone, monkeypatch, capsys, failing):
    board = pytest.importorskip("torch.utils.tensorboard")

    def fail(*args, **settings):
        raise full_disk()

    monkeypatch.setattr(board.SummaryWriter, failing, fail)
    used(tiny_config(alone, metrics={"tensorboard": True}))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "metrics.tensorboard has failed" in err and "No space" in err


# TensorBoard writes in a thread of its own, which the full disk ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_trackers_fail_is_complete(alone, monkeypatch, capsys):
    pytest.importorskip("torch.utils.tensorboard")
    fake = FakeRun("log", ConnectionError("gone"))
    fake_wandb(monkeypatch, fake.init)
    write_text(alone)
    both = {"wandb": True, "tensorboard": True}
    tables = tiny_tables(alone, training={"steps": 3}, metrics=both)
    torchmars.run_training(config_from_tables(tables, "in a test"))
    assert [*metrics(tables)] == [1, 2, 3]
    assert capsys.readouterr().err.count("metrics.wandb has failed") == 1


class Killed(BaseException):
    """Nothing of a run catches it."""


class Server:
    """What W&B has: the rows of each run, by step. `init` and `log` do as those of wandb.

    `online` a run that continues takes no step that it has, as wandb's own does not; offline it
    takes them all. At step `killed_at` the process dies.
    """

    def __init__(self, online):
        self.online, self.killed_at = online, None
        self.rows, self.refused, self.settings = {}, [], []

    def init(self, **settings):
        self.settings.append(settings)
        rows = self.rows.setdefault(settings["id"], [])
        self.first = max((step for step, _ in rows), default=0) + 1 if self.online else 0
        return types.SimpleNamespace(
            log=lambda values, step: self.log(rows, values, step),
            finish=lambda: None,
            offline=not self.online,
            url="https://wandb.ai/our-team/books",
            settings=types.SimpleNamespace(sync_dir="here"),
        )

    def log(self, rows, values, step):
        if step < self.first:
            self.refused.append(step)
        else:
            self.first = step if self.online else 0
            rows += [(step, name) for name in values]
        if step == self.killed_at:
            raise Killed

    def train(self, tables, killed_at=None):
        self.killed_at = killed_at
        try:
            torchmars.run_training(config_from_tables(tables, "in a test"))
            assert killed_at is None
        except Killed:
            pass


@pytest.fixture(params=full_but(["online"], ["online", "offline"]))
def server(request, alone, monkeypatch):
    """W&B's server, for runs in the folder of `alone` with a text."""
    made = Server(request.param == "online")
    fake_wandb(monkeypatch, made.init)
    return made


def test_a_killed_run_is_one_at_wandb(alone, server, capsys):
    """It is killed twice: before its first checkpoint, and two steps after one."""
    write_text(alone)
    tables = tiny_tables(
        alone,
        training={"steps": 6},
        checkpoint={"interval": 3},
        validation={"interval": 2, "windows": 4},
        metrics={"wandb": True},
    )
    server.train(tables, killed_at=2)
    server.train(tables, killed_at=5)
    server.train(tables)
    ((id, rows),) = server.rows.items()
    assert not server.refused and "failed" not in capsys.readouterr().err
    assert [step for step, name in rows if name == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert len(rows) == len(set(rows)) and (6, "validation/loss") in rows
    for given in server.settings:
        assert (given["id"], given["resume"], given["name"]) == (id, "allow", "tiny")
    server.train(tables | {"run": tables["run"] | {"name": "another"}})
    assert len(server.rows) == 2


def test_steps_that_are_made_again_are_at_wandb_once(alone, server):
    """A start may end before it is where another one was."""
    config = tiny_config(alone, metrics={"wandb": True})
    used(config, steps=range(1, 7))
    used(config, 0, steps=range(1, 4), reached=6)
    used(config, 2, steps=(3, 4, 5, 6, 7, 7), reached=3)
    (rows,) = server.rows.values()
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert not server.refused


@pytest.mark.parametrize("kept", ["a b", b"\xff 3"])
def test_an_id_that_is_damaged_is_a_new_one(alone, server, kept):
    config = tiny_config(alone, metrics={"wandb": True})
    config.run.path.mkdir(parents=True)
    file = config.run.path / trackers.WANDB_FILE
    file.write_bytes(kept if isinstance(kept, bytes) else kept.encode())
    used(config)
    used(config, reached=3)
    (id,) = server.rows
    assert id != "a" and [step for step, _ in server.rows[id]] == [1, 2, 3]


def netrc(home):
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")


CASES = {
    "nothing": ({}, "needs an account.*WANDB_MODE=offline"),
    "empty key": ({"API_KEY": ""}, "needs an account"),
    "no key": ({"API_KEY": "x"}, "metrics.wandb cannot be used: .*API key must have"),
    "no mode": ({"MODE": "nonsense"}, "metrics.wandb cannot be used: .*'offline'"),
    "key": ({"API_KEY": KEY}, None),
    "offline": ({"MODE": "offline"}, None),
    "disabled": ({"MODE": "disabled"}, None),
    "login": (netrc, None),
}


@pytest.mark.parametrize("case", full_but(["nothing", "no mode", "key", "offline"], CASES))
def test_an_account_that_is_needed(alone, monkeypatch, capsys, case):
    """W&B itself is asked, once in a process; it says nothing."""
    given, wrong = CASES[case]
    wandb = pytest.importorskip("wandb")
    if callable(given):
        given(alone)
    else:
        for name, value in given.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
    check_trackers(MetricsConfig())
    with nullcontext() if wrong is None else pytest.raises(UserError, match=wrong):
        check_trackers(MetricsConfig(wandb=True))
    wandb.teardown()
    assert capsys.readouterr().err == ""
