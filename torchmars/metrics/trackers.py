"""Trackers: TensorBoard and Weights & Biases, each where the config asks for it.

The run does not depend on them: metrics.jsonl has all that they get.
"""

import configparser
import contextlib
import netrc
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from torchmars.begin import is_missing
from torchmars.config import MetricsConfig, ResolvedConfig
from torchmars.core.console import say
from torchmars.core.errors import UserError, missing_package
from torchmars.core.files import PARTIAL, open_to_write, read_text

WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
LOCAL_MODES = ("offline", "disabled", "dryrun")  # which need no account
# A server that is gone must not keep the ranks at the end. What was not sent lies in the run's
# folder, for `wandb sync`.
FINISH_SECONDS = 300
WANDB_FILE = "wandb_run"  # in the run's folder: its id at W&B, and the last step that is there
NETRC = (Path("~/.netrc"), Path("~/_netrc"))


class Tracker(Protocol):
    """The interface of every tracker."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add the measurements of a step."""

    def close(self) -> None:
        """Write pending numbers, and end."""


class Service(Tracker, Protocol):
    """A tracker of another package. Each call may raise anything."""

    def abandon(self) -> None:
        """Leave it after a failure. May wait."""


class TensorBoard:
    """Writes TensorBoard events to the run folder."""

    def __init__(self, config: ResolvedConfig, step: int) -> None:
        """Open it to continue after `step`: events of later steps are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(config.run.path / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()

    def abandon(self) -> None:
        """Its thread ends by itself."""


class WeightsAndBiases:
    """Logs to Weights & Biases, with all settings of the run: one run there over all its starts.

    A row there cannot be changed once a later one has come. Steps that are made again, after a
    crash or a rollback, are left out.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        import wandb

        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_SECONDS))
        self.file = config.run.path / WANDB_FILE
        self.id, self.last = wandb_run(self.file)
        self.made = self.last  # steps up to it are there
        self._keep()
        self.run = wandb.init(
            project=config.metrics.wandb_project,
            id=self.id,
            resume="allow",
            name=config.run.name,
            group=config.run.name,
            dir=config.run.path,
            config=asdict(config),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        if step < self.last:
            self.made = self.last
        if step <= self.made:
            return
        if step > self.last:
            self.last = step
            self._keep()  # first: a kill between the two must not give a step twice
        self.run.log(values, step=step)

    def _keep(self) -> None:
        """Write the id and the last step, if the disk takes them; W&B's server has them too."""
        partial = self.file.with_name(self.file.name + PARTIAL)
        with contextlib.suppress(OSError):
            with open(partial, "w", opener=open_to_write) as stream:
                stream.write(f"{self.id} {self.last}\n")
            partial.replace(self.file)

    def close(self) -> None:
        self.run.finish()

    def abandon(self) -> None:
        """Undo W&B's work and messages at the end of the process."""
        import wandb

        wandb.teardown(exit_code=1)


class Guarded:
    """A tracker that ends no run: a failure of it is told once, and then it gets nothing more."""

    def __init__(self, option: str, open: Callable[[], Service]) -> None:
        """`open` the tracker that the config asks for by `option`."""
        self.option = option
        self.tracker: Service | None = None
        try:
            self.tracker = open()
        except (Exception, SystemExit) as error:
            self._drop(error)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._ask(lambda tracker: tracker.write(step, values))

    def close(self) -> None:
        self._ask(lambda tracker: tracker.close())

    def _ask(self, call: Callable[[Service], None]) -> None:
        try:
            if self.tracker is not None:
                call(self.tracker)
        except (Exception, SystemExit) as error:
            self._drop(error)

    def _drop(self, error: BaseException) -> None:
        if (tracker := self.tracker) is not None:
            self.tracker = None
            threading.Thread(target=abandon, args=(tracker,), daemon=True).start()
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        say(
            f"warning: {self.option} has failed and gets nothing more of this run, which continues "
            f"({said}); metrics.jsonl has all",
            error=True,
        )


def abandon(tracker: Service) -> None:
    """Leave a tracker that has failed, whatever it does then."""
    with contextlib.suppress(Exception, SystemExit):
        tracker.abandon()


def open_trackers(config: ResolvedConfig, step: int) -> list[Tracker]:
    """Open the trackers that `config` asks for, to continue after `step`.

    It takes the whole config, since Weights & Biases shows it. Raises `UserError`.
    """
    check_trackers(config.metrics)
    trackers: list[Tracker] = []
    if config.metrics.tensorboard:
        trackers.append(Guarded("metrics.tensorboard", partial(TensorBoard, config, step)))
    if config.metrics.wandb:
        trackers.append(Guarded("metrics.wandb", partial(WeightsAndBiases, config)))
    return trackers


def wandb_run(file: Path) -> tuple[str, int]:
    """Return a run's id at W&B, and the last step that is there: those of `file`, or new ones.

    WANDB_RUN_ID, which W&B's own launchers set, wins.
    """
    given = os.environ.get("WANDB_RUN_ID")
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is damaged
        id, step = read_text(file).split()
        if given in (None, "", id):
            return id, int(step)
    return given or secrets.token_hex(8), 0


def check_trackers(config: MetricsConfig) -> None:
    """Raise `UserError` if a tracker that the config asks for cannot be had."""
    for name, extra in {"tensorboard": "tensorboard", "wandb": ""}.items():
        if getattr(config, name) and is_missing(name):
            raise missing_package(name, f"metrics.{name}", extra)
    if not config.wandb:
        return
    settings = wandb_settings()
    mode = settings.get("mode", "online")
    if mode not in WANDB_MODES:
        raise UserError(f"WANDB_MODE must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
    if mode not in LOCAL_MODES and not has_account(settings):
        raise UserError(
            "metrics.wandb needs an account of Weights & Biases: log in once by wandb login, set "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep its files on this machine"
        )


def wandb_settings() -> dict[str, str]:
    """Return the values of W&B's files of settings, and of its variables, which win."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    folder = Path(os.environ.get("WANDB_DIR") or ".")
    files = configparser.ConfigParser(interpolation=None)
    try:
        files.read([home / "settings", folder / "wandb" / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # W&B says so
        files.clear()
    found = dict(files["default"]) if files.has_section("default") else {}
    for name in ("mode", "api_key", "identity_token_file", "base_url"):
        if given := os.environ.get(f"WANDB_{name.upper()}"):
            found[name] = given
    return found


def has_account(settings: dict[str, str]) -> bool:
    """Return whether W&B finds a key here: in its settings, or in the file of `wandb login`."""
    if settings.get("api_key") or settings.get("identity_token_file"):
        return True
    home = filter(os.path.exists, map(os.path.expanduser, NETRC))
    file = os.path.expanduser(os.environ.get("NETRC") or next(home, os.devnull))
    try:
        entries = netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    if host := urlsplit(settings.get("base_url", "")).netloc:
        return host in entries
    # The name of its server depends on its version. `wandb login` calls all users "user".
    return any(login == "user" or "wandb" in name for name, (login, *_) in entries.items())
