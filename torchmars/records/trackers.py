"""Trackers: TensorBoard and Weights & Biases, each where the config asks for it.

The run does not depend on them: metrics.jsonl has all that they get.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchmars.begin import is_missing
from torchmars.config import MetricsConfig, ResolvedConfig
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError, missing_package
from torchmars.core.files import read_text, write_durably

LOCAL_MODES = ("offline", "disabled", "dryrun")  # of W&B, which need no account
# A server that is gone must not keep the ranks at the end. What was not sent lies in the run's
# folder, for `wandb sync`.
FINISH_SECONDS = 300
WANDB_FILE = "wandb_run"  # in the run's folder: its id at W&B, and the last step that is there


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


class WeightsAndBiases:
    """Logs to Weights & Biases, with all settings of the run: one run there over all its starts.

    A row there cannot be changed once a later one has come. Steps that are made again, after a
    crash, are left out.
    """

    def __init__(self, config: ResolvedConfig, reached: int) -> None:
        """Open it. The run has reported up to step `reached` before this start."""
        import wandb

        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_SECONDS))
        id, self.last = wandb_run(config.run.path / WANDB_FILE, reached)
        wandb.setup(wandb.Settings(silent=True))
        self.run = wandb.init(
            project=config.metrics.wandb_project,
            id=id,
            resume="allow",
            name=config.run.name,
            group=config.run.name,
            dir=config.run.path,
            config=asdict(config),
        )
        place = self.run.settings.sync_dir if self.run.offline else self.run.url
        say(*labelled("wandb", str(place)))

    def write(self, step: int, values: dict[str, float]) -> None:
        if step > self.last:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


# Each opens a tracker of a run, to continue after a step. [metrics] asks for ours.
TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Tracker:
    """A tracker that ends no run: a failure of it is told once, and then it gets nothing more."""

    def __init__(self, option: str, open: Callable[[], Any]) -> None:
        """`open` the tracker that the config asks for by `option`."""
        self.option = option
        self.tracker: Any = None
        with self._told():
            self.tracker = open()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add the measurements of a step."""
        with self._told():
            if self.tracker is not None:
                self.tracker.write(step, values)

    def close(self) -> None:
        """Write pending numbers, and end."""
        with self._told():
            if self.tracker is not None:
                self.tracker.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell a failure of the body, and use the tracker no more. It may raise anything."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.tracker = None
            said = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            say(
                f"warning: {self.option} has failed and gets nothing more of this run, which "
                f"continues ({said}); metrics.jsonl has all",
                error=True,
            )


def open_trackers(config: ResolvedConfig, step: int, reached: int) -> list[Tracker]:
    """Open the trackers that `config` asks for, to continue after `step`.

    The run has reported up to step `reached` before. W&B shows the whole config.
    """
    asked = {"tensorboard": config.metrics.tensorboard, "wandb": config.metrics.wandb}
    trackers = []
    for name, open in TRACKERS.items():
        if asked.get(name, True):
            after = reached if name == "wandb" else step
            option = f"metrics.{name}" if name in asked else name
            trackers.append(Tracker(option, partial(open, config, after)))
    return trackers


def wandb_run(file: Path, reached: int) -> tuple[str, int]:
    """Return a run's id at W&B, and the last step that is there; keep both in `file`.

    They are those of `file`, or new ones. Steps up to `reached` have come since they were kept.
    """
    id, last = secrets.token_hex(8), 0
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is damaged
        kept, step = read_text(file).split()
        id, last = kept, max(int(step), reached)
    with contextlib.suppress(OSError):  # W&B's server knows the last step too
        write_durably(file, f"{id} {last}\n")
    return id, last


def check_trackers(config: MetricsConfig) -> None:
    """Raise `UserError` if a tracker that the config asks for cannot be had."""
    for name, extra in {"tensorboard": "tensorboard", "wandb": ""}.items():
        if getattr(config, name) and is_missing(name):
            raise missing_package(name, f"metrics.{name}", extra)
    if config.wandb and not has_account():
        raise UserError(
            "metrics.wandb needs an account of Weights & Biases: log in once by wandb login, set "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep its files on this machine"
        )


def has_account() -> bool:
    """Return whether W&B has a key here, or needs none. Raises `UserError` for its settings."""
    import wandb

    try:
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        return mode in LOCAL_MODES or wandb.login(prompt=False, verify=False)
    except Exception as error:  # such as a WANDB_MODE that there is not
        raise UserError(f"metrics.wandb cannot be used: {error}") from None
