"""Trackers end no run, and an account that is missing is known before the work."""

import errno
import os
import sys
import types

import pytest

import torchmars
from tests.support.full import full_but
from tests.support.tiny import metrics, tiny_config, tiny_tables, write_text
from torchmars.config import MetricsConfig
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.metrics import trackers
from torchmars.metrics.trackers import check_trackers, open_trackers

KEY = "0123456789" * 4


def full_disk():
    return OSError(errno.ENOSPC, "No space left on device")


class FakeRun:
    """What `wandb.init` gives; one of its calls, or none, fails."""

    def __init__(self, failing, error):
        self.failing, self.error, self.calls = failing, error, []

    def call(self, name, /, *args, **settings):
        self.calls.append(name)
        if name == self.failing:
            raise self.error
        return self

    def __getattr__(self, name):
        return lambda *args, **settings: self.call(name, *args, **settings)


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


def used(config):
    """Open the trackers of a config, and use them for three steps."""
    opened = open_trackers(config, 0)
    for step in (1, 2, 3):
        for each in opened:
            each.write(step, {"train/loss": 1.0})
    for each in opened:
        each.close()


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [full_disk(), RuntimeError("gone\nfor good"), KeyError("x")])
def test_a_failure_of_wandb_is_told_once(alone, monkeypatch, capsys, failing, error):
    fake = FakeRun(failing, error)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fake.init))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "9")
    used(tiny_config(alone, metrics={"wandb": True}))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("warning: metrics.wandb has failed")
    assert type(error).__name__ in err
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_for_tensorboards_own_thread(alone, monkeypatch, capsys):
    """It writes on a thread of its own, and says so at a later call."""
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter

    def fail(*args):
        raise full_disk()

    monkeypatch.setattr(RecordWriter, "write", fail)
    used(tiny_config(alone, metrics={"tensorboard": True}))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "metrics.tensorboard has failed" in err


# TensorBoard writes in a thread of its own, which the full disk ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_trackers_fail_is_complete(alone, monkeypatch, capsys):
    pytest.importorskip("torch.utils.tensorboard")
    fake = FakeRun("log", ConnectionError("gone"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fake.init))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "9")
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
            log=lambda values, step: self.log(rows, values, step), finish=lambda: None
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
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=made.init))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "9")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
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


def test_steps_after_a_rollback_are_at_wandb_once(alone, server):
    """The process may go back itself, and end before it is where it was."""
    config = tiny_config(alone, metrics={"wandb": True})
    config.run.path.mkdir(parents=True)
    for step, steps in [(0, (1, 2, 3, 4, 3, 4, 5, 6, 4)), (4, (5, 6, 6, 7, 7))]:
        (tracker,) = open_trackers(config, step)
        for each in steps:
            tracker.write(each, {"train/loss": 1.0})
    (rows,) = server.rows.values()
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert not server.refused


@pytest.mark.parametrize("kept", ["", "a", "a b", "a 1 2", b"\xff 3"])
def test_an_id_that_is_damaged_is_a_new_one(alone, server, kept):
    config = tiny_config(alone, metrics={"wandb": True})
    config.run.path.mkdir(parents=True)
    file = config.run.path / trackers.WANDB_FILE
    file.write_bytes(kept if isinstance(kept, bytes) else kept.encode())
    used(config)
    used(config)
    (id,) = server.rows
    assert id != "a" and [step for step, _ in server.rows[id]] == [1, 2, 3]


def test_the_id_of_wandbs_own_launcher_wins(alone, server, monkeypatch):
    config = tiny_config(alone, metrics={"wandb": True})
    config.run.path.mkdir(parents=True)
    used(config)
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    used(config)
    used(config)
    assert [*server.rows][1:] == ["of-a-sweep"]
    assert [step for step, _ in server.rows["of-a-sweep"]] == [1, 2, 3]


def netrc_of(host, login="user"):
    return lambda home: (home / ".netrc").write_text(
        f"machine {host}\n  login {login}\n  password {KEY}\n"
    )


def settings_of(text, file=".config/wandb/settings"):
    def write(home):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(f"[default]\n{text}\n")

    return write


WITH = {
    "key": {"WANDB_API_KEY": KEY},
    "token": {"WANDB_IDENTITY_TOKEN_FILE": "token"},
    "offline": {"WANDB_MODE": "offline"},
    "disabled": {"WANDB_MODE": "disabled"},
    "dryrun": {"WANDB_MODE": "dryrun"},
    "login": netrc_of("api.wandb.ai"),
    "login of another version": netrc_of("api.elsewhere.com"),
    "settings": settings_of(f"api_key = {KEY}"),
    "wandb offline": settings_of("mode = offline", "wandb/settings"),
}
WITHOUT = {
    "nothing": {},
    "empty key": {"WANDB_API_KEY": ""},
    "online": {"WANDB_MODE": "online"},
    "shared": {"WANDB_MODE": "shared"},
    "login elsewhere": netrc_of("github.com", "me"),
    "damaged login": lambda home: (home / ".netrc").write_text("machine"),
    "damaged settings": lambda home: settings_of("[")(home),
    "settings without": settings_of("project = x"),
}


def prepared(case, home, monkeypatch):
    if callable(case):
        case(home)
    else:
        for name, value in case.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", WITH)
def test_an_account_or_none_that_is_needed(alone, monkeypatch, case):
    prepared(WITH[case], alone, monkeypatch)
    check_trackers(MetricsConfig(wandb=True))


@pytest.mark.parametrize("case", WITHOUT)
def test_no_account_is_a_mistake(alone, monkeypatch, case):
    prepared(WITHOUT[case], alone, monkeypatch)
    check_trackers(MetricsConfig())
    with pytest.raises(UserError, match="metrics.wandb needs an account.*WANDB_MODE=offline"):
        check_trackers(MetricsConfig(wandb=True))


def test_a_login_for_another_server_does_not_count(alone, monkeypatch):
    netrc_of("api.wandb.ai")(alone)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my.org")
    with pytest.raises(UserError, match="needs an account"):
        check_trackers(MetricsConfig(wandb=True))
    netrc_of("wandb.my.org")(alone)
    check_trackers(MetricsConfig(wandb=True))


def test_a_home_that_cannot_be_read_has_no_account(alone, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as unreadable:
        unreadable.setattr(os, "stat", refused)
        found = trackers.has_account({})
    assert not found
