"""Trials as processes of this machine, several at a time."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torchmars.benchmark.measure import ranks_of
from torchmars.cluster.environment import read_environment
from torchmars.cluster.process import found_as_here, send_once_gone, start_launcher
from torchmars.comparison.study import Study, Trial
from torchmars.comparison.trials import OUTPUT_FILE, write_trial
from torchmars.core.device import VISIBLE, visible_gpus
from torchmars.core.errors import EXIT_STOPPED, UserError
from torchmars.core.files import open_to_write, own_cores
from torchmars.core.words import counted
from torchmars.training.preparation import prepare_run


class Process(Protocol):
    """A trial that was started."""

    def poll(self) -> int | None:
        """Return its exit code, -n for signal n; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""


class LocalTrials:
    """Runs trials on this machine, `jobs` at a time; each gets its share of GPUs and cores."""

    def __init__(self, study: Study, jobs: int) -> None:
        """Raises `UserError` if there are fewer GPUs than jobs, and for wrong variables."""
        self.study, self.jobs = study, jobs
        gpus = visible_gpus()
        if gpus and len(gpus) < jobs:
            raise UserError(
                f"--jobs: {jobs} trials at a time need as many GPUs, there are {len(gpus)}"
            )
        share = len(gpus) // jobs
        self.places = [",".join(gpus[job * share : (job + 1) * share]) for job in range(jobs)]
        self.ranks = ranks_of(study.base, share or 1)
        given = read_environment(os.environ).OMP_NUM_THREADS
        self.threads = given or max(1, own_cores() // (jobs * self.ranks))
        self.running: dict[str, tuple[Trial, Process, str]] = {}

    def describe(self) -> str:
        """Return how trials are run, in words."""
        threads = counted(self.threads, "thread")
        ranks = counted(self.ranks, "rank")
        return f"{self.jobs} at a time, each on {ranks} with {threads} of the CPU"

    def prepare(self) -> None:
        """Make the shards of all trials, and check for errors that all of them would have.

        An error of one trial alone, such as a damaged checkpoint, ends that one.
        """
        prepare_run(self.study.base, self.ranks, 1)

    def start(self, trials: list[Trial]) -> None:
        """Start as many of the trials that are left to do as there is room for, in order."""
        for trial in trials:
            if len(self.running) == self.jobs:
                return
            if trial.name not in self.running:
                taken = {place for _, _, place in self.running.values()}
                place = next(each for each in self.places if each not in taken or not each)
                process = start_process(write_trial(trial), self.variables(place))
                self.running[trial.name] = (trial, process, place)

    def variables(self, place: str) -> dict[str, str]:
        """Return the environment of a trial on the GPUs of a place."""
        own = {"NGPU": str(self.ranks), "NNODES": "1", "OMP_NUM_THREADS": str(self.threads)}
        return dict(os.environ) | own | ({VISIBLE: place} if place else {})

    def ended(self) -> list[tuple[Trial, int | None]]:
        """Return the trials that have ended since, and their exit codes; not those stopped."""
        over: list[tuple[Trial, int | None]] = []
        for trial, process, _ in list(self.running.values()):
            if (code := process.poll()) is not None:
                del self.running[trial.name]
                if code != EXIT_STOPPED:
                    over.append((trial, code if code >= 0 else 128 - code))  # 128 + n for signal n
        return over

    def stop(self) -> str:
        """Ask the running trials to save and end; return that in words."""
        for _, process, _ in self.running.values():
            process.send_signal(signal.SIGTERM)
        return f"waiting for {counted(len(self.running), 'trial')} to save"


class ForkedTrial:
    """A trial of one rank without a GPU, forked from a process that has imported all it needs.

    So a small trial starts in half a second, where a launcher and its rank import for ten.
    """

    def __init__(self, file: Path, variables: dict[str, str]) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["torchmars.train", "torchmars.training.build"])
        own = {"OMP_NUM_THREADS": variables["OMP_NUM_THREADS"], **found_as_here(variables)}
        with changed_variables(own):  # the server reads them where it starts and imports torch
            self.process = forks.Process(target=train_alone, args=(file, variables))
            self.process.start()

    def poll(self) -> int | None:
        """Return its exit code, -n for signal n; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def train_alone(file: Path, variables: dict[str, str]) -> None:
    """Train a trial in this process, which is forked. It saves and ends once its server is gone.

    The server ends with the process that has started it.
    """
    os.setsid()  # else a terminal would send it Ctrl-C too
    os.environ.clear()
    os.environ.update(variables)
    send_once_gone(os.getppid(), signal.SIGTERM)
    with (
        open(file.parent / OUTPUT_FILE, "ab", opener=open_to_write) as output,
        open(os.devnull) as nothing,
    ):
        for stream, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(stream.fileno(), number)
    sys.argv = ["torchmars train", str(file)]
    importlib.import_module("torchmars.train").main()


@contextlib.contextmanager
def changed_variables(variables: dict[str, str]) -> Iterator[None]:
    """Change variables of the environment in the body."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_process(file: Path, variables: dict[str, str]) -> Process:
    """Start to train the config of a trial, whose output goes to a file beside it."""
    if variables.get("NGPU") == "1" and not visible_gpus():
        return ForkedTrial(file, variables)
    with open(file.parent / OUTPUT_FILE, "ab", opener=open_to_write) as output:
        return start_launcher(
            ["--prepared", str(file)],
            variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
